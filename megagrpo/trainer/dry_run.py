"""Tries the inputs of a run without weights and servers: data, one rendered prompt, lengths, and calls of each reward."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from megagrpo.config import DataSection, DatasetSection, ProblemError, RunConfig, evaluation_sets
from megagrpo.data.prompts import PromptSource
from megagrpo.data.text_rows import ANSWERS, names_in, nested
from megagrpo.data.tokenizer import Tokenizer, read_chat_template, tokenizer_of
from megagrpo.families.sources import PACKAGE, resolve_model
from megagrpo.multi_turn.dialogues import make_dialogues
from megagrpo.plan import plan
from megagrpo.records.sinks.trackers import check_trackers
from megagrpo.rewards.registry import display_names, resolve
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout

DRESSES = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "#### {}")  # forms of a right answer that rewards look for
EMPTY, ANSWER = "empty", "answer"  # the completions that rewards are called with
GROUP = 2  # completions of a call: with one, a function that returns one value for all would pass


@dataclass(frozen=True)
class SourceTrial:
    """A data set as the run sees it. `lengths` are tokens of every row's prompt; `text` is one rendered prompt, that of row `row`."""

    key: str
    source: str
    prompt_column: str
    columns: list[str]
    lengths: list[int]
    limit: int
    num_overlong: int
    overlong: str
    num_usable: int
    row: int
    num_tokens: int
    text: str


@dataclass(frozen=True)
class RewardTrial:
    """One call of a reward function. `value` is None for a completion that the function cannot score. `failure` is the last line of its
    error, or empty."""

    function: str
    weight: float
    completion: str
    text: str
    column: str
    value: float | None
    milliseconds: float
    failure: str


@dataclass
class DryRun:
    """The result: what was read and called, what was left out, and the problems."""

    ranks: int
    sources: list[SourceTrial] = field(default_factory=list)
    rewards: list[RewardTrial] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    not_called: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, *problems: object) -> None:
        """Add problems that are not known yet."""
        self.problems += [str(problem) for problem in problems if str(problem) not in self.problems]

    def collecting(self) -> Collecting:
        """Return a context manager that turns a ValueError inside it into one problem per line."""
        return Collecting(self)


@dataclass(frozen=True)
class Collecting(AbstractContextManager[None, bool]):
    """The context manager of `DryRun.collecting`. It is a class because a type checker then knows that it suppresses errors."""

    result: DryRun

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if isinstance(error, ProblemError):
            self.result.add(*error.problems)
        elif isinstance(error, ValueError):
            self.result.add(*str(error).split("\n"))
        return isinstance(error, ValueError)


def dry_run(config: RunConfig, base_folder: Path, models: bool = False) -> DryRun:
    """Try the inputs of a run; `base_folder` is the folder of its config. With `models` it also loads reward models.

    Problems are collected, not raised.
    """
    result = DryRun(config.parallel.smallest_world)
    result.add(*plan(config, result.ranks).problems)
    with result.collecting():
        check_trackers(config)
    with ExitStack() as resources:
        tools: Sequence[dict[str, Any]] = ()
        prompt: Prompt | None = None
        loaded: list[Tokenizer] = []
        with result.collecting():
            loaded.append(_tokenizer(config))
        if not loaded:
            return result
        tokenizer = loaded[0]
        with result.collecting():
            dialogues = make_dialogues(config, tokenizer, base_folder, resources)
            tools = dialogues.tools if dialogues else ()
            result.tools += [str(tool.get("function", tool).get("name")) for tool in tools]
        for key, section, data in _sections(config):
            with result.collecting():
                source = PromptSource(section, data, tokenizer, config.rollout.max_prompt_length, config.run.seed, key, tools)
                result.warnings += source.warnings
                (first,) = source.peek(1)
                prompt = prompt or first
                result.sources.append(_trial(key, section, data, source, first, tokenizer, config, tools))
                if key == "data.train":
                    config.with_num_prompts(len(source))  # the rules about the number of steps
        if prompt is not None:
            _try_rewards(config, base_folder, prompt, tokenizer, models, result)
    return result


def _tokenizer(config: RunConfig) -> Tokenizer:
    """Load the tokenizer. Of a model on the hub it fetches the tokenizer's files only."""
    path = config.model.path
    folder = str(resolve_model(path)) if path.startswith(PACKAGE) or os.path.exists(os.path.expanduser(path)) else path
    return tokenizer_of(config, folder)


def _sections(config: RunConfig) -> Iterator[tuple[str, DatasetSection, DataSection]]:
    """Yield key, data set and the keys of `data` that apply to it, for training and each held-out set."""
    yield "data.train", config.data.train, config.data
    for name, section in evaluation_sets(config).items():
        own = {key: getattr(section, key) for key in ("prompt_column", "columns", "extract_hash_answer")}
        yield f"evaluation.sets.{name}" if name else "data.eval", section, config.data.model_copy(update=own)


def _trial(
    key: str,
    section: DatasetSection,
    data: DataSection,
    source: PromptSource,
    prompt: Prompt,
    tokenizer: Tokenizer,
    config: RunConfig,
    tools: Sequence[dict[str, Any]],
) -> SourceTrial:
    text = tokenizer.rendered(prompt.messages, data.system_prompt, read_chat_template(data.chat_template), tools, prompt.template_kwargs)
    return SourceTrial(
        key=key,
        source=section.source,
        prompt_column=data.prompt_column,
        columns=source.columns,
        lengths=source.lengths,
        limit=config.rollout.max_prompt_length,
        num_overlong=source.num_overlong,
        overlong=data.overlong_prompts,
        num_usable=len(source),
        row=prompt.prompt_id,
        num_tokens=len(prompt.token_ids),
        text=str(prompt.messages) if text is None else text,
    )


def _try_rewards(config: RunConfig, base_folder: Path, prompt: Prompt, tokenizer: Tokenizer, models: bool, result: DryRun) -> None:
    """Call each reward function with the answer of the prompt's row and with an empty completion."""
    functions = config.rewards.functions
    with result.collecting():
        heavy = [resolve(f.function, config.rewards.plugins).heavy and not models for f in functions]
        names = display_names(functions)
        result.not_called += [name for name, left_out in zip(names, heavy, strict=True) if left_out]
        chosen = [f for f, left_out in zip(functions, heavy, strict=True) if not left_out]
        if not chosen:
            return
        section = config.rewards.model_copy(update={"functions": chosen, "workers": 1})
        with RewardScorer(section, config.rollout.max_completion_length, base_folder) as scorer:
            try:
                scorer.check_columns(prompt.columns)
            except ValueError as error:
                raise ValueError(f"{error}{_gold_hint(prompt)}") from error
            weights = dict(zip(scorer.names, (f.weight for f in chosen), strict=True))
            own = {name: _answer(prompt, needs) for name, needs in scorer.needs.items()}
            usual = next((answer for answer in own.values() if answer[1] is not None), ("", None))
            answers = {name: usual if answer[1] is None else answer for name, answer in own.items()}
            for text in dict.fromkeys([*(text for _, text in answers.values()), ""]):
                if text is not None:
                    _call(scorer, prompt, tokenizer, text, weights, answers, result)
            _warn_of_unscored(scorer, prompt, tokenizer, answers, result)


def _gold_fields(prompt: Prompt) -> list[str]:
    """Return the fields of the row's columns that have a usual name of the right answer, as `reward_model.ground_truth`."""
    return [name for name in names_in(prompt.columns) if name not in prompt.columns and name.rpartition(".")[2] in ANSWERS]


def _gold_hint(prompt: Prompt) -> str:
    """Return how to pass the right answer to rewards when it is a field of a column, as in verl's rows; else an empty string."""
    fields = _gold_fields(prompt)
    return f"; data.columns={{answer: {fields[0]}}} passes the field `{fields[0]}` as `answer`" if fields else ""


def _warn_of_unscored(
    scorer: RewardScorer, prompt: Prompt, tokenizer: Tokenizer, answers: dict[str, tuple[str, str | None]], result: DryRun
) -> None:
    """Warn when no reward gives the row's right answer more than an empty completion, whatever form the answer has."""
    (column, answer), *_ = [*(found for found in answers.values() if found[1] is not None), ("", None)]
    if answer is None or result.problems:
        return
    (empty,) = scorer.score([_rollout(prompt, tokenizer, "")])
    for dress in DRESSES:
        (scored,) = scorer.score([_rollout(prompt, tokenizer, dress.format(answer))])
        if any(value is not None and value > (empty.rewards[name] or 0.0) for name, value in scored.rewards.items()):
            return
    value = nested(prompt.columns, column)
    result.warnings.append(
        f"rewards.functions: no reward gives the answer in column `{column}`, {value!r:.60} ({type(value).__name__}), more than an empty "
        "completion; compare values of one type, and look at what the function searches for"
    )


def _answer(prompt: Prompt, needs: Sequence[Sequence[str]]) -> tuple[str, str | None]:
    """Return column and text of the right answer: a column that the function needs, else one with a usual name; ("", None) without."""
    for name in (*(name for alternatives in needs for name in alternatives), *ANSWERS):
        value = prompt.columns.get(name)
        if isinstance(value, (str, int, float)) and str(value):
            return name, str(value)
    fields = [(name, nested(prompt.columns, name)) for name in _gold_fields(prompt)]
    return next(((name, str(value)) for name, value in fields if isinstance(value, (str, int, float))), ("", None))


def _rollout(prompt: Prompt, tokenizer: Tokenizer, text: str) -> Rollout:
    """Return a completion of the prompt with this text."""
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return Rollout(prompt, token_ids, (0.0,) * len(token_ids), "stop", 0, text)


def _call(
    scorer: RewardScorer,
    prompt: Prompt,
    tokenizer: Tokenizer,
    text: str,
    weights: dict[str, float],
    answers: dict[str, tuple[str, str | None]],
    result: DryRun,
) -> None:
    """Score a group of equal completions, and record the values of the functions whose answer they are; of all for empty completions."""
    scored, *_ = scorer.score([_rollout(prompt, tokenizer, text)] * GROUP)
    metrics = scorer.metrics()
    for name, value in scored.rewards.items():
        column, answer = answers[name]
        if text and answer != text:
            continue
        failed = [counter for counter in ("exceptions", "timeouts") if metrics[f"rewards/{name}/{counter}"]]
        failure = (
            scorer.tracebacks.get(name, "").strip().split("\n")[-1] if "exceptions" in failed else "no result in time" if failed else ""
        )
        kind = ANSWER if text else EMPTY
        seconds = metrics[f"rewards/{name}/seconds"] / GROUP
        result.rewards.append(RewardTrial(name, weights[name], kind, text, column if text else "", value, 1000 * seconds, failure))
        if failure:
            completion = f"the answer in column `{column}`" if text else "an empty completion"
            result.add(f"rewards.functions: `{name}` fails for {completion}: {failure}; correct the function")
