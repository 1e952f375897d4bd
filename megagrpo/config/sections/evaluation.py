"""Defines the section `evaluation`: held-out sets, their sampling, and the criterion of a correct response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.data import DatasetSection
from megagrpo.config.sections.section import Fraction, GreedyOrTemperature, NonNegativeInt, PositiveInt, Section

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
OF_DATA = ("prompt_column", "columns", "extract_hash_answer")
OF_EVALUATION = ("temperature", "top_p", "top_k", "num_generations")


class EvaluationSet(DatasetSection):
    """A data set with its own sampling."""

    prompt_column: str | None = None
    """Column with the question; `data.prompt_column` when empty."""
    columns: dict[str, str] | None = None
    """Renames columns for the reward functions; `data.columns` when empty."""
    extract_hash_answer: list[str] | None = None
    """Columns that are passed on from after `####` on; `data.extract_hash_answer` when empty."""
    temperature: GreedyOrTemperature | None = None
    """Sampling temperature, 0 is greedy; `evaluation.temperature` when empty."""
    top_p: Fraction | None = None
    """Nucleus sampling; `evaluation.top_p` when empty."""
    top_k: NonNegativeInt | None = None
    """Sample among so many tokens; `evaluation.top_k` when empty."""
    num_generations: PositiveInt | None = None
    """Responses per prompt; `evaluation.num_generations` when empty."""
    max_completion_length: PositiveInt | None = None
    """Longest response in tokens; `rollout.max_completion_length` when empty."""


class FilledSet(DatasetSection):
    """A data set with the sampling of an `EvaluationSet`; empty fields come from `data`, `evaluation` and `rollout`."""

    prompt_column: str
    columns: dict[str, str]
    extract_hash_answer: list[str]
    temperature: float
    top_p: float
    top_k: int
    num_generations: int
    max_completion_length: int


class EvaluationSection(Section):
    steps: NonNegativeInt = 0
    """Evaluate every so many steps; with `data.eval` or `evaluation.sets` also before the first and after the last."""
    sets: dict[SetName, EvaluationSet] = {}
    """More held-out data sets by name. Their metrics are `eval/NAME/...`; metrics of `data.eval` are `eval/...`."""
    temperature: GreedyOrTemperature = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    top_p: Fraction = 1.0
    """Sample among the most likely tokens that add up to this probability; 1 keeps all."""
    top_k: NonNegativeInt = 0
    """Sample among so many of the most likely tokens; 0 keeps all."""
    num_generations: PositiveInt = 1
    """Responses per held-out prompt."""
    pass_function: str | None = None
    """Name (as in the metrics) of the reward function that decides if a response passes; the first of
    `rewards.functions` when empty."""
    pass_reward: float = 1.0
    """A response passes when that function gives it at least this, before its weight."""
    answer: Literal["auto", "number", "tag", "boxed", "text"] = "auto"
    """The part of a response that votes in maj@k: its last number, the last <answer>...</answer>, the answer by the
    rules of docs/answers.md (boxed), or the whole text. auto: the part that a built-in `pass_function` reads."""
    keep_best: str | None = None
    """Also keep the checkpoint whose evaluation is highest in this metric, named without `eval/`: `reward`, `pass@1`,
    `NAME/pass@1`. It is saved after evaluation despite `run.save_steps`; `checkpoints/best` points to it."""


def evaluation_sets(config: RunConfig) -> dict[str, FilledSet]:
    """Return name -> held-out set, empty keys filled from `data` and `evaluation`. The name of `data.eval` is
    "", of that of a task the task's."""
    if config.tasks:
        found = [(task.name, evaluation_sets(task.config)) for task in config.each_task]
        return {name: sets[""] for name, sets in found if sets}
    data, evaluation = config.data, config.evaluation
    sets = {} if data.eval is None else {"": EvaluationSet(**data.eval.model_dump())}
    return {name: _filled(section, config) for name, section in (sets | evaluation.sets).items()}


def _filled(section: EvaluationSet, config: RunConfig) -> FilledSet:
    defaults = {key: getattr(config.data, key) for key in OF_DATA} | {
        key: getattr(config.evaluation, key) for key in OF_EVALUATION
    }
    defaults["max_completion_length"] = config.rollout.max_completion_length
    return FilledSet(**defaults | {key: value for key, value in section if value is not None})


def _best_problems(metric: str, config: RunConfig) -> Iterator[Problem]:
    """Yield a metric whose set does not exist, or a pass@K or maj@K that the set's responses do not give."""
    sets = evaluation_sets(config)
    name = next((name for name in sets if name and metric.startswith(f"{name}/")), "")
    keys = ("evaluation.keep_best", "evaluation.sets", "data.eval", "evaluation.num_generations")
    if name not in sets:
        reason = f"there is no data.eval, and no set of that name; write one of {', '.join(sets)}, then /METRIC"
        yield Problem(keys, f"{metric}: {reason}")
        return
    n = sets[name].num_generations
    estimate, _, k = metric.removeprefix(f"{name}/").partition("@")
    fits = {"pass": [2**i for i in range(n.bit_length()) if 2**i <= n] + [n], "maj": [n] * (n > 1)}.get(estimate)
    if fits is not None and k and k not in map(str, fits):
        choice = ", ".join(f"{estimate}@{k}" for k in dict.fromkeys(fits)) or "pass@1"
        reason = f"{n} response(s) per prompt do not give it; choose {choice}, or change num_generations"
        yield Problem(keys, f"{metric}: {reason}")


def evaluation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield evaluation settings without held-out prompts, and several greedy responses to one prompt."""
    evaluation, sets = config.evaluation, ("data.eval", "evaluation.sets")
    held_out = bool(evaluation_sets(config))
    if evaluation.steps and not held_out:
        reason = f"{evaluation.steps} needs held-out prompts; set data.eval or evaluation.sets, or set steps to 0"
        yield Problem(("evaluation.steps", *sets), reason)
    if evaluation.keep_best is not None and not held_out:
        reason = "needs held-out prompts; set data.eval or evaluation.sets, or leave keep_best empty"
        yield Problem(("evaluation.keep_best", *sets), f"{evaluation.keep_best} {reason}")
    if evaluation.keep_best is not None and held_out:
        yield from _best_problems(evaluation.keep_best, config)
    has_data_eval = not evaluation.sets or config.data.eval is not None
    if evaluation.num_generations > 1 and evaluation.temperature == 0 and has_data_eval:
        reason = f"{evaluation.num_generations} greedy responses (temperature 0) are identical"
        fix = "raise evaluation.temperature, or use 1"
        yield Problem(("evaluation.num_generations", "evaluation.temperature", *sets), f"{reason}; {fix}")
    for name in evaluation.sets:
        filled = _filled(evaluation.sets[name], config)
        if filled.num_generations > 1 and filled.temperature == 0:
            sections = (f"evaluation.sets.{name}", "evaluation")
            keys = tuple(f"{section}.{key}" for section in sections for key in ("num_generations", "temperature"))
            reason = f"{filled.num_generations} greedy responses (temperature 0) are identical"
            yield Problem(keys, f"{reason}; raise the set's temperature, or use 1")
