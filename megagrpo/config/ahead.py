"""What generation that runs ahead of training does not go with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.config.multi_turn import ANSWERING
from megagrpo.config.problems import Problem

if TYPE_CHECKING:
    from megagrpo.config import RunConfig


def ahead_problems(config: RunConfig) -> list[Problem]:
    """Settings that contradict `rollout.max_staleness` above 0, and what says nothing at 0."""
    r, a = config.rollout, config.algorithm
    if not r.max_staleness:
        idle = {"in_flight": (r.in_flight, "keep"), "straggler_seconds": (r.straggler_seconds, None)}
        return [
            Problem(
                (f"rollout.{name}", "rollout.max_staleness"),
                f"{value} says something of generation that runs ahead; set rollout.max_staleness above 0, or leave it out",
            )
            for name, (value, default) in idle.items()
            if value != default
        ]
    key, value, problems = "rollout.max_staleness", r.max_staleness, []
    if r.placed == "colocated":
        problems.append(
            Problem(
                (key, "rollout.placement", "rollout.urls"),
                f"{value} needs servers that generate while the policy trains, and rollout.placement {r.placement} shares the trainer's "
                "GPUs; set it to dedicated, or name servers in rollout.urls",
            )
        )
    if config.train.offload:
        said = "true empties the GPU while servers generate, which they do while the policy trains; leave it empty"
        problems.append(Problem(("train.offload", key), said))
    if a.loss.whole_step:
        said = f"{value} trains on what older weights have sampled, and the loss {a.loss_type} has no correction for that; set it to 0"
        problems.append(Problem((key, "algorithm.loss_type"), said))
    elif a.importance_correction == "off":
        problems.append(
            Problem(
                (key, "algorithm.importance_correction"),
                f"{value} trains on what older weights have sampled, and algorithm.importance_correction is off; set it to "
                "token_truncate, or max_staleness to 0",
            )
        )
    if config.lora.syncs_adapters:
        said = f"{value} has servers take weights while they generate, and lora.sync adapter swaps adapters; set it to merged"
        problems.append(Problem((key, "lora.sync", "lora.rank"), said))
    if config.multi_turn.enabled:
        problems.append(Problem((key, *ANSWERING), f"{value}: the turns of multi_turn are not generated ahead; set it to 0"))
    return problems
