"""Checks the rules of generation that runs ahead of training (`rollout.max_staleness`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.config.multi_turn import ANSWERING
from megagrpo.config.problems import Problem

if TYPE_CHECKING:
    from megagrpo.config import RunConfig


def ahead_problems(config: RunConfig) -> list[Problem]:
    """Return settings that contradict `rollout.max_staleness` above 0, and settings that have no effect at 0."""
    r, a = config.rollout, config.algorithm
    if not r.max_staleness:
        idle = {"in_flight": (r.in_flight, "keep"), "straggler_seconds": (r.straggler_seconds, None)}
        return [
            Problem(
                (f"rollout.{name}", "rollout.max_staleness"),
                f"{value} only applies with rollout.max_staleness > 0; raise max_staleness, or leave {name} out",
            )
            for name, (value, default) in idle.items()
            if value != default
        ]
    key, value, problems = "rollout.max_staleness", r.max_staleness, []
    if r.placed == "colocated":
        problems.append(
            Problem(
                (key, "rollout.placement", "rollout.urls"),
                f"{value} requires servers that generate during training, but rollout.placement {r.placement} shares "
                f"the trainer's GPUs; "
                "set placement to dedicated, or list servers in rollout.urls",
            )
        )
    if config.train.offload:
        said = (
            "true offloads the trainer while servers generate, but with rollout.max_staleness > 0 they generate "
            "during training; "
        )
        said += "leave it empty"
        problems.append(Problem(("train.offload", key), said))
    if a.loss.whole_step:
        said = (
            f"{value} trains on responses of older weights, but loss_type {a.loss_type} has no importance "
            f"correction; set max_staleness "
        )
        said += "to 0"
        problems.append(Problem((key, "algorithm.loss_type"), said))
    elif a.importance_correction == "off":
        problems.append(
            Problem(
                (key, "algorithm.importance_correction"),
                f"{value} trains on responses of older weights, but algorithm.importance_correction is off; set the "
                f"correction to "
                "token_truncate, or max_staleness to 0",
            )
        )
    if config.lora.syncs_adapters:
        said = (
            f"{value} updates the weights of generating servers, which lora.sync adapter does not support; set "
            f"lora.sync to merged"
        )
        problems.append(Problem((key, "lora.sync", "lora.rank"), said))
    if config.multi_turn.enabled:
        problems.append(Problem((key, *ANSWERING), f"{value} does not support multi_turn; set max_staleness to 0"))
    return problems
