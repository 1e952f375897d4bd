"""Tries every reward function on rows of the data, and names rows, functions or columns a run cannot learn from."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megagrpo.config import RewardFunction, RewardsSection
from megagrpo.data.prompts import PromptSource
from megagrpo.data.sources.text_rows import ANSWERS, names_in
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.rewards.registry.reward_registry import resolve
from megagrpo.rewards.registry.target import JUDGES, REPEATABLE
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.data_checks.data_trial import TRAIN, repeated_warning, shared_warning
from megagrpo.trainer.data_checks.gold_trial import PROGRAM_KIND, ROWS, FunctionTrial, Means, RewardTrial, RowFault
from megagrpo.trainer.data_checks.golds import find_golds
from megagrpo.trainer.evaluation.sets import HeldOut
from megagrpo.types import Prompt

MAX_GOLD_SHOWN = 60  # characters of a gold in a warning
SECONDS_AT_START = 4.0  # for golds in a run that starts, all functions together
JUDGE_CONNECT_SECONDS = 3.0  # for a connection to a judge
NEXT_ROWS = 5  # further rows that a warning names


def trial_scorer(
    rewards: RewardsSection, max_completion_length: int, base_folder: Path, models: bool
) -> tuple[RewardScorer | None, list[str]]:
    """Return the scorer of the functions that are tried, if any, and lines about the others: without `models` reward
    models are not loaded, and the run's servers do not judge. Raises ValueError for functions that cannot be loaded."""
    left = [""] * len(rewards.functions)
    for i, f in enumerate(rewards.functions):
        if resolve(f.function).heavy and not models:
            left[i] = "loads a reward model; add --models"
        elif f.own_judge:
            left[i] = "asks the run's own servers"
    named = list(zip(rewards.functions, rewards.names, left, strict=True))
    chosen = [f.model_copy(update={"name": name}) for f, name, reason in named if not reason]
    section = rewards.model_copy(update={"functions": chosen})
    scorer = RewardScorer(section, max_completion_length, base_folder) if chosen else None
    return scorer, [f"{name}: not called, because it {reason}" for _, name, reason in named if reason]


def try_rewards(
    scorer: RewardScorer, sets: Mapping[str, tuple[Sequence[Prompt], int]], tokenizer: Tokenizer, services: set[str]
) -> Iterator[RewardTrial]:
    """Yield the trial of each function on each of the `sets`, which are prompts and the limit of a response by config
    key. `services` are the names of functions whose servers are asked about one row. Raises ValueError for columns that
    functions miss."""
    for key, (prompts, max_tokens) in sets.items():
        _check_columns(scorer, key, prompts[0])
        yield from _trials(key, Means(scorer, tokenizer, max_tokens), scorer.names, prompts, services)


def _trials(
    key: str, means: Means, names: Sequence[str], prompts: Sequence[Prompt], services: Collection[str] = ()
) -> Iterator[RewardTrial]:
    scorer = means.scorer
    faults = scorer.row_faults([prompt.columns for prompt in prompts])
    golds = {name: find_golds(prompts, f.signature["needs"]) for name, f in scorer.functions.items()}
    usual = next(filter(None, golds.values()), None)
    for name in names:
        rows = _by_row(prompts, faults[name]) if name in faults else None
        yield FunctionTrial(means, name, prompts, golds[name] or usual, service=name in services).result(key, rows)


def _by_row(prompts: Sequence[Prompt], faults: Sequence[tuple[int, str]]) -> list[RowFault]:
    return [(prompts[i].prompt_id, phrase) for i, phrase in faults]


def start_warnings(
    functions: Sequence[RewardFunction],
    train: PromptSource,
    held_out: Sequence[HeldOut],
    scorer: RewardScorer,
    tokenizer: Tokenizer,
    key: str = TRAIN,
    seconds: float = SECONDS_AT_START,
) -> list[str]:
    """Return the warnings about the data set `key`, held-out sets and rewards for the log of a run that starts.

    Golds are tried for `seconds`, if all functions are built-in and repeatable: calls of others may have effects.
    """
    lines = [*train.warnings, *unreachable_judges(functions), *repeated_warning(key, train.repeated(), len(train))]
    for one in held_out:
        lines += [*one.warnings, *shared_warning(one.key, train.shared_with(one.prompts), len(one.prompts))]
    prompts = train.sample(ROWS)
    if all(f.function in REPEATABLE for f in functions):
        means = Means(scorer, tokenizer, scorer.max_completion_length, seconds / max(1, len(scorer.names)))
        lines += reward_warnings(key, list(_trials(key, means, scorer.names, prompts)))
    else:
        faults = scorer.row_faults([prompt.columns for prompt in prompts])
        rows = {name: _by_row(prompts, row_faults) for name, row_faults in faults.items()}
        lines += fault_warnings(key, len(prompts), unscorable(rows))
    return [f"warning: {line}" for line in lines]


def unreachable_judges(functions: Sequence[RewardFunction]) -> list[str]:
    """Return a line for each judge at whose address nothing accepts a connection."""
    lines = []
    for number, function in enumerate(functions):
        url = str(function.args.get("url") or "") if function.function in JUDGES else ""
        with contextlib.suppress(ValueError):  # a port that is no number: the function's own error names it
            parts = urlsplit(url)
            try:
                if parts.hostname:
                    at = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
                    socket.create_connection(at, JUDGE_CONNECT_SECONDS).close()
            except OSError as error:
                key = f"rewards.functions[{number}].args.url"
                lines.append(f"{key}: no judge responds at {url}: {error}; start it, or correct the address")
    return lines


def _check_columns(scorer: RewardScorer, key: str, prompt: Prompt) -> None:
    try:
        scorer.check_columns(prompt.columns)
    except ValueError as error:
        raise ValueError(f"{key}: {error}{_gold_hint(prompt)}") from error


def _gold_hint(prompt: Prompt) -> str:
    """Return how to pass rewards the answer when it is a field of a column, as in verl's rows; else an empty string."""
    names = [name for name in names_in(prompt.columns) if name not in prompt.columns]
    fields = [name for name in names if name.rpartition(".")[2] in ANSWERS]
    return f"; data.columns={{answer: {fields[0]}}} passes the field `{fields[0]}` as `answer`" if fields else ""


def unscorable(faults: Mapping[str, Sequence[RowFault]]) -> dict[int, str]:
    """Return row -> `NAME: phrase` of the rows in which every function that looks for faults finds one."""
    by_function = [{row: f"`{name}`: {phrase}" for row, phrase in rows} for name, rows in faults.items()]
    first = by_function[0] if by_function else {}
    return {row: phrase for row, phrase in first.items() if all(row in other for other in by_function)}


def fault_warnings(key: str, num_rows: int, faults: Mapping[int, str]) -> list[str]:
    """Return a line for the rows that no function can score, of `num_rows` that were looked at."""
    if not faults:
        return []
    row = min(faults)
    count = f"{len(faults)} of {num_rows} rows cannot be scored"
    return [f"{key}: {count}, first row {row}: {faults[row]}; correct or remove the rows"]


def reward_warnings(key: str, trials: Sequence[RewardTrial]) -> list[str]:
    """Return a line for each thing that a run cannot learn from, for the trials of all functions on one data set."""
    if not trials:
        return []
    counted = [trial for trial in trials if trial.weight]
    refused_by_all = unscorable({trial.function: trial.row_faults for trial in counted if trial.row_faults is not None})
    refused = {trial.function: dict(trial.row_faults or []) for trial in counted}
    best_of = {trial.function: {row.row for row in trial.trials if row.best} for trial in counted}
    scored = {row for name, rows in best_of.items() for row in rows - refused[name].keys()}
    faults = {row: phrase for row, phrase in refused_by_all.items() if row not in scored}
    clear = set(faults).union(*best_of.values())
    lines = fault_warnings(key, max(trial.num_rows for trial in trials), faults)
    if not any(trial.failure for trial in counted):
        lines += _golds(key, [trial for trial in counted if trial.column], clear)
    return lines + [line for trial in trials for line in _of_function(trial, clear)]


def _of_function(trial: RewardTrial, clear: Collection[int]) -> list[str]:
    """Return a line when a function gives all responses the same, for rows without a gold, and for overlong golds."""
    lines, column = [], f"column `{trial.column}`"
    if trial.constant and not trial.needs_gold:
        after = f", after `{trial.opened}` at the end of the prompt" if trial.opened else ""
        tried = f"golds in all forms{after}, golds of other rows, empty and long ones"
        value = f"`{trial.function}` gives every response {_number(trial.empty)}"
        lines.append(f"rewards.functions: {value}: {tried}; correct the function, or remove it")
    if missing := [row.row for row in trial.trials if trial.column and not row.gold and row.row not in clear]:
        count = f"{len(missing)} of {trial.rows} rows have no gold in {column}, first row {missing[0]}"
        lines.append(f"{trial.data}: {count}; fill the column, or remove the rows")
    if trial.too_long:
        row, length = trial.longest
        limit = f"the {trial.limit} tokens of rollout.max_completion_length, longest in row {row}: {length}"
        lines.append(
            f"{trial.data}: {trial.too_long} of {trial.rows} golds in {column} are longer than {limit}; raise the limit"
        )
    return lines


def _golds(key: str, trials: Sequence[RewardTrial], clear: Collection[int]) -> list[str]:
    """Return a line for golds that do not score best with any function."""
    telling = [trial for trial in trials if trial.best]
    pairs = [(trial, row) for trial in telling or trials for row in trial.trials]
    doubtful = [(trial, row) for trial, row in pairs if row.gold and row.row not in clear]
    rows = sorted({row.row for _, row in doubtful})
    if not rows or not any(trial.reads_columns for trial in trials):
        return []
    # Of several functions, show one that reads a column and can score the row.
    first = [pair for pair in doubtful if pair[1].row == rows[0]]
    trial, row = min(first, key=lambda pair: (not pair[0].needs_gold, pair[1].value is None))
    gold = row.gold if len(row.gold) <= MAX_GOLD_SHOWN else f"{row.gold[: MAX_GOLD_SHOWN - 3]}..."
    values = (
        f"row {row.row}: `{trial.function}` gives {gold!r} ({trial.kind}, column `{trial.column}`) "
        f"{_number(row.value)}, another row's gold {_number(row.other)}, an empty response {_number(row.empty)}"
    )
    if telling:
        also = f"; also rows {', '.join(map(str, rows[1 : 1 + NEXT_ROWS]))}" if len(rows) > 1 else ""
        count = f"{len(rows)} of {trial.rows} golds do not score best"
        return [f"{key}: {count}, {values}; correct or remove the rows{also}"]
    is_program = trial.kind == PROGRAM_KIND
    fix = "look for the format of its tests in docs/rewards.md" if is_program else "compare values of one type"
    reason = f"no reward gives a gold of {key} more than an empty response and another row's gold"
    return [f"rewards.functions: {reason}, {values}; {fix}, and look at what the function searches for"]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
