"""What generation that runs ahead of training does not go with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megagrpo.config import RunConfig


def ahead_problems(config: RunConfig) -> list[str]:
    """Settings that contradict `rollout.max_staleness` above 0, and what says nothing at 0."""
    r, a = config.rollout, config.algorithm
    if not r.max_staleness:
        idle = {"in_flight": (r.in_flight, "keep"), "straggler_seconds": (r.straggler_seconds, None)}
        return [
            f"rollout.{name}: {value} says something of generation that runs ahead; set rollout.max_staleness above 0, or leave it out"
            for name, (value, default) in idle.items()
            if value != default
        ]
    key, problems = f"rollout.max_staleness: {r.max_staleness}", []
    if r.placed == "colocated":
        problems.append(
            f"{key} needs servers that generate while the policy trains, and rollout.placement {r.placement} shares the trainer's GPUs; "
            "set it to dedicated, or name servers in rollout.urls"
        )
    if config.train.offload:
        problems.append("train.offload: true empties the GPU while servers generate, which they do while the policy trains; leave it empty")
    if a.loss_type == "real":
        problems.append(f"{key} trains on what older weights have sampled, and the loss real has no correction for that; set it to 0")
    elif a.importance_correction == "off":
        problems.append(
            f"{key} trains on what older weights have sampled, and algorithm.importance_correction is off; set it to token_truncate, or "
            "max_staleness to 0"
        )
    if config.lora.syncs_adapters:
        problems.append(f"{key} has servers take weights while they generate, and lora.sync adapter swaps adapters; set it to merged")
    if config.multi_turn.enabled:
        problems.append(f"{key}: the turns of multi_turn are not generated ahead; set it to 0")
    return problems
