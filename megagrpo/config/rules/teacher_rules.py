"""Checks the rules of `algorithm.teacher`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.evaluation import evaluation_sets

if TYPE_CHECKING:
    from megagrpo.config import RunConfig


def teacher_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield teachers without a model, and options that contradict them."""
    for number, teacher in enumerate(config.algorithm.teacher):
        key = f"algorithm.teacher.{number}"
        if teacher.path is None:
            yield Problem((f"{key}.path",), "the teacher has no model; name one as model.path does")
        weights = teacher.weight.values() if isinstance(teacher.weight, dict) else [teacher.weight]
        if min(weights, default=0.0) < 0:
            reason = f"{min(weights):g} is negative, which drives the policy away from its teacher; set it to 0 or more"
            yield Problem((f"{key}.weight",), reason)
        if isinstance(teacher.weight, dict) and min(teacher.weight, default=1) < 1:
            reason = f"{min(teacher.weight)} is not a step, which begin at 1; name another"
            yield Problem((f"{key}.weight",), reason)
        if config.rollout.truncates:
            cause = "rollout.top_p, top_k and min_p exclude different tokens of teacher and policy"
            keys = (f"{key}.divergence", "rollout.top_p", "rollout.top_k", "rollout.min_p")
            yield Problem(keys, f"{teacher.divergence} compares the same tokens, but {cause}; sample from all tokens")
        if teacher.over == "sampled" and teacher.divergence != "reverse":
            reason = f"{teacher.divergence} needs distributions, but over is sampled; set it to reverse"
            yield Problem((f"{key}.divergence", f"{key}.over"), reason)
        if config.train.fused_logprobs and teacher.over != "sampled":
            reason = "true writes no logits, which a teacher needs; set it to false"
            yield Problem(("train.fused_logprobs", key), reason)
    if not config.algorithm.teacher:
        return
    if config.data.images:
        yield Problem(("algorithm.teacher", "data.images"), "a teacher sees no images; leave one of them out")
    if config.rewards.functions or config.tasks or config.multi_turn.enabled:
        return
    if config.algorithm.dynamic_sample:
        reason = "true compares rewards, but rewards.functions is empty; set it to false"
        yield Problem(("algorithm.dynamic_sample", "rewards.functions"), reason)
    if evaluation_sets(config):
        reason = "held-out prompts need a function that scores them; name one in rewards.functions, with weight 0 if"
        yield Problem(("rewards.functions", "data.eval", "evaluation.sets"), f"{reason} only the teacher is to train")
