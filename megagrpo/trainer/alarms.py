"""Decides after each step whether a run's numbers call for a warning or an end: the engine's mismatch, and rewards that only raise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megagrpo.config import RolloutSection, RunConfig

FIRST_STEPS = 5  # whose mismatch is the run's usual one
JUMP = 3.0  # an alarm is this many times as far from 1 as the usual mismatch
NORMAL = {"float32": 1.01, "bfloat16": 1.1}  # `token_mult_prob_error` of sound runs stays below; in bf16 it grows with the entropy


def mismatch_limit(config: RunConfig, dtype: str, first: Sequence[float]) -> float | None:
    """What `token_mult_prob_error` of a step may be; None: anything.

    `dtype` is the least precise that trainer or engine computes in, `first` the errors of the run's first steps, `FIRST_STEPS` at most.
    """
    rollout = config.rollout
    if rollout.mismatch_threshold is not None:
        return rollout.mismatch_threshold
    if rollout.max_staleness:  # training moves the number, too
        return None
    usual = 1 + JUMP * (statistics.median(first) - 1) if len(first) == FIRST_STEPS else None
    if _quantizes(config):  # what is normal depends on the model
        return usual and max(usual, NORMAL["bfloat16"])
    return max(usual or 1.0, NORMAL[dtype])


def mismatch_warning(rollout: RolloutSection, dtype: str, step: int, error: float, limit: float, first: Sequence[float]) -> str:
    """The warning of a step whose error is above `limit`."""
    if rollout.mismatch_threshold is not None:
        rule = f"rollout.mismatch_threshold {limit:g}"
    else:
        usual = f" and {statistics.median(first):.4g} in the first {len(first)} steps" if len(first) == FIRST_STEPS else ""
        rule = f"{limit:.4g} (normal: up to {NORMAL[dtype]:g} in {dtype}{usual})"
    return (
        f"warning: step {step}: token_mult_prob_error {error:.6g} is above {rule}: vLLM samples from another distribution than the trainer "
        "computes. After a jump, check weight_version in completions.jsonl and the server's log. From the first step on, check "
        "rollout.quantization and rollout.extra_args, try model.precision=fp32, and audit a dumped step"
    )


def always_raising(metrics: dict[str, float], config: RunConfig) -> list[str]:
    """The reward functions that failed for every response that the step drew."""
    groups = metrics.get("dynamic_sample/groups_drawn", config.rollout.prompts_per_step)
    counts = {name: value for name, value in metrics.items() if name.startswith("rewards/") and name.endswith("/exceptions")}
    names = [name.removeprefix("rewards/").removesuffix("/exceptions") for name in counts]
    return [name for name, count in zip(names, counts.values(), strict=True) if count >= groups * config.rollout.num_generations]


def _quantizes(config: RunConfig) -> bool:
    """Whether trainer or engine multiplies in fewer bits than `model.precision` has."""
    return config.rollout.quantization != "none" or config.model.fp8_recipe != "none" or config.model.base_storage != "none"
