"""Predicts the memory of teachers (`algorithm.teacher`), and checks their shapes."""

from __future__ import annotations

from collections.abc import Iterator

from megagrpo.config import LoraSection, Problem, ProblemError, RunConfig
from megagrpo.families.hf_config import HfConfig, load_hf_config, model_problems
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.costs.shapes import stages_of


def teacher_problems(config: RunConfig, model: HfConfig, fetch: bool) -> Iterator[Problem]:
    """Yield teachers that cannot be seen, that the layout does not divide, or whose vocabulary is not the one of the
    policy's `model`."""
    for number, teacher in enumerate(config.algorithm.teacher):
        keys = (f"algorithm.teacher.{number}.path",)
        if teacher.is_own or teacher.urls:
            continue
        try:
            shape = load_hf_config(shape_folder(str(teacher.path), fetch))
        except ProblemError as error:
            yield from (type(problem)(keys, problem.text) for problem in error.problems)
            continue
        if shape.vocab_size != model.vocab_size:
            reason = f"{teacher.path} has {shape.vocab_size} tokens, the policy {model.vocab_size}"
            yield Problem(keys, f"{reason}; name a teacher with the policy's tokens")
        yield from (Problem(keys, f"in the policy's layout: {p.text}") for p in model_problems(shape, config.parallel))


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
