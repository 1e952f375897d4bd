"""Checks a run that samples nothing: from the responses of rows, without rewards or turns, or from kept rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megagrpo.config.basics.problems import Problem

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

# Keys without effect on such a run, by section; of a section without names all keys.
ONLY_SAMPLING: dict[str, tuple[str, ...]] = {
    "algorithm": (
        *("kl_estimator", "use_bias_correction_kl", "loss_average", "epsilon", "epsilon_high", "delta"),
        *("advantage_estimator", "scale_rewards", "multi_objective_aggregation", "skip_zero_advantage"),
        *("teacher", "kl_in_reward", "sync_ref_model", "num_iterations", "steps_per_generation", "dynamic_sample"),
        *("importance_correction", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "advantage_by"),
        *("off_policy_mask_threshold", "mask_truncated_completions", "importance_sampling_level"),
    ),
    "rollout": (
        *("temperature", "top_p", "top_k", "min_p", "max_staleness", "routing_replay", "logit_bias"),
        *("allowed_token_ids", "repetition_penalty", "structured_outputs"),
        *("urls", "stop", "quantization"),
    ),
    "data": ("images", "source", "curriculum", "sampling_column", "extract_hash_answer"),
    "multi_turn": (),
    "rewards": ("functions",),
    "debug": ("dump_steps",),
}


def row_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield keys that have no effect on a run which learns from rows."""
    algorithm, name = config.algorithm, config.algorithm.loss_type
    if unknown := [key for key in algorithm.loss_args if key not in algorithm.loss.arguments]:
        known = f"it has {', '.join(algorithm.loss.arguments)}" if algorithm.loss.arguments else "it has none"
        reason = f"loss_type {name} has no argument `{unknown[0]}`; {known}"
        yield Problem(("algorithm.loss_args", "algorithm.loss_type"), reason)
    if not 0 <= algorithm.loss_args.get("label_smoothing", 0) < 0.5:
        reason = f"label_smoothing {algorithm.loss_args['label_smoothing']:g} must be from 0 to below 0.5"
        yield Problem(("algorithm.loss_args",), reason)
    if algorithm.loss.generates:
        return
    if config.tasks:
        yield Problem(("tasks", "algorithm.loss_type"), f"loss_type {name} learns from the rows of data.train alone")
    for section, names in ONLY_SAMPLING.items():
        values = getattr(config, section)
        for key, field in type(values).model_fields.items():
            if (value := getattr(values, key)) != field.get_default(call_default_factory=True) and key in (
                names or (key,)
            ):
                reason = f"has no effect: loss_type {name} learns from the responses of rows, and samples none"
                shown = value if isinstance(value, bool | int | float | str) else "this"
                yield Problem((f"{section}.{key}", "algorithm.loss_type"), f"{shown} {reason}; leave it out")
    if not algorithm.beta and algorithm.loss.method == "dpo":
        reason = f"0 compares nothing: it scales the loss_type {name}; set it to 0.1, or to 2 for simpo"
        yield Problem(("algorithm.beta", "algorithm.loss_type"), reason)
    if algorithm.beta and algorithm.loss.method != "dpo":
        reason = f"{algorithm.beta:g} has no effect: loss_type {name} has no reference; leave it out"
        yield Problem(("algorithm.beta", "algorithm.loss_type"), reason)


def kept_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what a run without servers cannot do, and a choice of kept rollouts without any."""
    kept, key = config.rollout.kept, "rollout.kept.path"
    if kept.to_step and (kept.path is None or kept.by == "prompt"):
        reason = "ends a run on kept rollouts by step; set run.max_steps instead"
        yield Problem(("rollout.kept.to_step", "rollout.kept.by", key), f"{kept.to_step} {reason}")
    if kept.path is None:
        if kept.by != "step":
            yield Problem(("rollout.kept.by", key), f"{kept.by} has no effect without {key}; set it, or leave `by` out")
        return
    if config.all_rewards.own_judges:
        reason = "kept rollouts need no servers, so the run has none that could be the judge in args.judge"
        yield Problem((key, "rewards.functions"), f"{reason}; serve it with `vllm serve`, and name it in args.url")
    if config.evaluation.keep_best is not None:
        reason = f"{config.evaluation.keep_best} needs evaluations, which a run on kept rollouts does not generate"
        yield Problem((key, "evaluation.keep_best"), f"{reason}; leave keep_best empty")
    if kept.by == "prompt" and config.rollout.max_staleness:
        reason = "prompt takes rollouts of any age, and rollout.max_staleness limits the age; set one of them back"
        yield Problem(("rollout.kept.by", "rollout.max_staleness"), reason)
