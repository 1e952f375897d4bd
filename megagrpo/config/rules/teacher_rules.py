"""Checks the rules of `algorithm.teacher`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.algorithm import TeacherSection
from megagrpo.config.sections.evaluation import evaluation_sets

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

MOST_WEIGHT = 1e6


def teacher_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield teachers without a model, and options that contradict them."""
    for number, teacher in enumerate(config.algorithm.teacher):
        key = f"algorithm.teacher.{number}"
        if teacher.path is None:
            yield Problem((f"{key}.path",), "the teacher has no model; name one as model.path does")
        yield from _weight_problems(f"{key}.weight", teacher)
        yield from _row_problems(key, teacher, config)
        yield from _served_problems(key, teacher, config)
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
    if not config.all_rewards.functions and not any(_weights(teacher) for teacher in config.algorithm.teacher):
        reason = "every weight is 0, and rewards.functions is empty, so that nothing trains; raise one"
        yield Problem(("algorithm.teacher.0.weight", "rewards.functions"), reason)
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


def _weights(teacher: TeacherSection) -> list[float]:
    """Return the weights of a teacher that are not 0."""
    weights = teacher.weight.values() if isinstance(teacher.weight, dict) else [teacher.weight]
    return [weight for weight in weights if weight]


def _weight_problems(key: str, teacher: TeacherSection) -> Iterator[Problem]:
    """Yield weights that no step can have."""
    for weight in _weights(teacher):
        if weight < 0:
            reason = f"{weight:g} is negative, which drives the policy away from its teacher; set it to 0 or more"
            yield Problem((key,), reason)
        elif not weight <= MOST_WEIGHT:
            yield Problem((key,), f"{weight:g} is above {MOST_WEIGHT:g}: gradients overflow; lower it")
    if isinstance(teacher.weight, dict) and min(teacher.weight, default=1) < 1:
        yield Problem((key,), f"{min(teacher.weight)} is not a step, which begin at 1; name another")
    elif isinstance(teacher.weight, dict) and 1 not in teacher.weight:
        yield Problem((key,), "has no weight for step 1; add it, such as `1: 0`")


def _row_problems(key: str, teacher: TeacherSection, config: RunConfig) -> Iterator[Problem]:
    """Yield choices of rows that choose none, and prompts that change nothing."""
    for column, values in teacher.where.items():
        wrong = [values] if not isinstance(values, list) else values
        unknown = [value for value in wrong if config.tasks and value not in [task.name for task in config.tasks]]
        if not wrong:
            yield Problem((f"{key}.where",), f"{column} has no value, so that no row is taught; name one")
        elif column == "task" and unknown:
            yield Problem((f"{key}.where", "tasks"), f"{unknown[0]} is no task of `tasks`; name one of them")
    if teacher.path == "policy" and teacher.prompt is None and config.algorithm.updates_per_step == 1:
        reason = "the policy cannot learn from itself after the same prompt; set algorithm.teacher.N.prompt"
        yield Problem((f"{key}.path", f"{key}.prompt"), reason)
    turns = config.multi_turn
    for name in ("agent", "environment") if teacher.prompt is not None else ():
        if getattr(turns, name) is not None:
            reason = f"an {name} changes the prompt of a response, which teachers must then read; leave one of them out"
            yield Problem((f"{key}.prompt", f"multi_turn.{name}"), reason)


def _served_problems(key: str, teacher: TeacherSection, config: RunConfig) -> Iterator[Problem]:
    """Yield what servers, which report log-probs of the model's own distribution, cannot do."""
    if not teacher.urls:
        return
    for url in teacher.urls:
        if not url.startswith(("http://", "https://")) or url.rstrip("/").endswith("/v1") or url.endswith("/"):
            yield Problem((f"{key}.urls",), f"{url} is no address of a server; write http://HOST:PORT")
    if teacher.over == "vocabulary":
        reason = "vocabulary is more than servers send; set it to sampled, or a number such as 20"
        yield Problem((f"{key}.over", f"{key}.urls"), reason)
    if teacher.is_own:
        yield Problem((f"{key}.path", f"{key}.urls"), f"{teacher.path} is no served model; name the server's")
    rollout = config.rollout
    changed = (
        rollout.logit_bias or rollout.allowed_token_ids or rollout.structured_outputs or config.data.sampling_column
    )
    if rollout.temperature != 1 or rollout.repetition_penalty != 1 or changed:
        reason = "servers report log-probs at temperature 1 without changed logits; sample so, or load the teacher"
        yield Problem((f"{key}.urls", "rollout.temperature"), reason)
