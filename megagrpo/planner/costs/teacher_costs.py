"""Predicts the memory of teachers (`algorithm.teacher`) and of a critic, and checks their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from megagrpo.config import LoraSection, Problem, ProblemError, RunConfig
from megagrpo.families.hf_config import HfConfig, load_hf_config, model_problems
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.costs.shapes import Stage, stages_of


def teacher_problems(config: RunConfig, model: HfConfig, fetch: bool) -> Iterator[Problem]:
    """Yield teachers, and a critic with weights of its own, that cannot be seen, that the layout does not divide, or
    whose vocabulary is not the one of the policy's `model`."""
    teachers = enumerate(config.algorithm.teacher)
    local = [(number, one) for number, one in teachers if not (one.is_own or one.urls)]
    named = {f"algorithm.teacher.{number}.path": str(one.path) for number, one in local}
    if config.algorithm.critic.path is not None:
        named["algorithm.critic.path"] = config.algorithm.critic.path
    for key, path in named.items():
        try:
            shape = load_hf_config(shape_folder(path, fetch), scores="critic" in key)
        except ProblemError as error:
            yield from (type(problem)((key,), problem.text) for problem in error.problems)
            continue
        if shape.vocab_size < model.vocab_size:  # more may be padding, which the run compares by tokens
            reason = f"{path} has {shape.vocab_size} tokens, the policy {model.vocab_size}"
            yield Problem((key,), f"{reason}; name a {'critic' if 'critic' in key else 'teacher'} with its tokens")
        for problem in model_problems(shape, config.parallel):
            yield Problem((key,), f"in the policy's layout: {problem.text}")


def critic_memory(config: RunConfig, stage: Stage, of_policy: float) -> dict[str, float]:
    """Return the bytes of the critic on a rank of a stage: the policy's `of_policy`, or for weights of its own as many
    times these as it has parameters. A critic that cannot be seen counts as the policy."""
    if not config.algorithm.has_critic:
        return {}
    share = 1.0
    if (path := config.algorithm.critic.path) is not None:
        with suppress(ValueError):  # `teacher_problems` names it
            shape = load_hf_config(shape_folder(path, fetch=False), scores=True)
            own = stages_of(shape, config.parallel, LoraSection(), None)[stage.index]
            share = (own.outside + own.experts) / (stage.outside + stage.experts)
    return {"critic": share * of_policy}


def teacher_memory(config: RunConfig, model: HfConfig, stage: int, responses: float) -> tuple[dict[str, float], float]:
    """Return the bytes of all teachers on a rank of a stage: their weights as the part `teachers`, if any, and at the
    last stage the hidden states of `responses` tokens. A teacher that cannot be seen counts nothing; the policy and the
    reference, of the policy's `model`, have no weights more."""
    weights = hidden = 0.0
    for teacher in (one for one in config.algorithm.teacher if not one.urls):
        try:
            shape = model if teacher.is_own else load_hf_config(shape_folder(str(teacher.path), fetch=False))
            own = stages_of(shape, config.parallel, LoraSection(), None)[stage]
        except ValueError:  # `teacher_problems` names it
            continue
        weights += (own.outside + own.experts) * config.model.weight_bytes * (not teacher.is_own)
        kept = teacher.over == "vocabulary" and stage == config.parallel.pp - 1
        hidden += responses * shape.hidden_size * config.model.weight_bytes * kept
    return {"teachers": weights} if config.algorithm.teacher else {}, hidden
