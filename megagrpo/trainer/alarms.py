"""Alarms on a step's metrics: train/rollout mismatch above normal, and reward functions that always raise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megagrpo.config import RolloutSection, RunConfig

FIRST_STEPS = 5  # the mismatch of the first steps is the run's baseline
JUMP = 3.0  # alarm when the mismatch is this many times as far from 1 as the baseline
NORMAL = {"float32": 1.01, "bfloat16": 1.1}  # upper limit of `token_mult_prob_error` in healthy runs; in bf16 it grows with the entropy


def mismatch_limit(config: RunConfig, dtype: str, first: Sequence[float]) -> float | None:
    """Return the highest normal `token_mult_prob_error` of a step; None: no limit.

    `dtype` is the least precise compute dtype of trainer and engine, `first` the errors of the run's first steps, at most `FIRST_STEPS`.
    """
    rollout = config.rollout
    if rollout.mismatch_threshold is not None:
        return rollout.mismatch_threshold
    if rollout.max_staleness:  # training between sampling and the log-probs changes the number, too
        return None
    usual = 1 + JUMP * (statistics.median(first) - 1) if len(first) == FIRST_STEPS else None
    if _quantizes(config):  # the normal value depends on the model
        return usual and max(usual, NORMAL["bfloat16"])
    return max(usual or 1.0, NORMAL[dtype])


def mismatch_warning(rollout: RolloutSection, dtype: str, step: int, error: float, limit: float, first: Sequence[float]) -> str:
    """Return the warning text for a step whose error is above `limit`."""
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
    """Return the reward functions that raised for every response of the step."""
    groups = metrics.get("dynamic_sample/groups_drawn", config.rollout.prompts_per_step)
    counts = {name: value for name, value in metrics.items() if name.startswith("rewards/") and name.endswith("/exceptions")}
    names = [name.removeprefix("rewards/").removesuffix("/exceptions") for name in counts]
    return [name for name, count in zip(names, counts.values(), strict=True) if count >= groups * config.rollout.num_generations]


def _quantizes(config: RunConfig) -> bool:
    """Whether trainer or engine computes in fewer bits than `model.precision`."""
    return config.rollout.quantization != "none" or config.model.fp8_recipe != "none" or config.model.base_storage != "none"
