"""Checks data, prompts and rewards of CONFIG in seconds, without weights or a server.

    megagrpo check my_run.yaml
    megagrpo check my_run.yaml rollout.max_prompt_length=256 --json

Prints rows and columns of each data set, one rendered prompt, and the lengths of all prompts. Then it tries every
reward on up to 64 rows of each data set: the row's own right answer, right answers of other rows, and an empty
response. Warnings name the row, the value and the fix. Reward models (model:PATH) are loaded with --models only.

Exit code 0: no problem, or only warnings; 1: with --strict, a warning; 2: the listed problems prevent training.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from megagrpo.commands.arguments.config_arguments import add_config, load
from megagrpo.config import ConfigError
from megagrpo.config.io import config_file, listed
from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import one_line, show

if TYPE_CHECKING:
    from megagrpo.config.sections.rollout import RolloutSection
    from megagrpo.trainer.data_checks.data_trial import SourceTrial
    from megagrpo.trainer.data_checks.gold_trial import RewardTrial
    from megagrpo.trainer.dry_run import DryRun

SHOWN_LINES, SHOWN_WIDTH = 24, 96  # of a rendered prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo check`."""
    add = parser.add_argument
    add_config(parser)
    add("--rows", type=int, default=64, metavar="N", help="rows of each data set on which rewards are tried (64)")
    add("--models", action="store_true", help="also load reward models, and ask servers about all rows")
    add("--strict", action="store_true", help="exit with code 1 when there is a warning")
    add("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what was tried. Raises ConfigError with all problems."""
    if options.rows < 1:
        raise ConfigError(f"--rows {options.rows}: must be 1 or more")
    config, path = load(options), config_file(options.config)
    with without_garbage_collection():
        from transformers.utils.logging import disable_progress_bar

        from megagrpo.trainer.dry_run import dry_run
    disable_progress_bar()
    result = dry_run(config, path.parent, options.models, options.rows)
    if options.json:
        show(json.dumps(asdict(result), indent=1))
    else:
        for source in result.sources:
            show(source_text(source, config.rollout) + "\n")
        show(rewards_text(result))
    if result.problems:
        raise ConfigError(listed(options.config, result.problems))
    return int(options.strict and bool(result.warnings))


def source_text(source: SourceTrial, rollout: RolloutSection) -> str:
    """Return rows, columns, lengths and one rendered prompt of a data set."""
    prompts_per_step, budget = rollout.prompts_per_step, rollout.max_thinking_tokens
    limit = f", of at most {budget} tokens (rollout.max_thinking_tokens)" * bool(budget)
    lengths, usable = [length for length in source.lengths if length], source.num_usable
    epoch = f", an epoch is {usable / prompts_per_step:.1f} steps" if source.key == "data.train" else ""
    lines = [
        f"{source.key}: {source.source}",
        f"  rows      {len(source.lengths)}{epoch}",
        f"  columns   {source.prompt_column} (prompt), for rewards: {', '.join(source.columns) or 'none'}",
        f"  tokens    min {min(lengths)}, median {statistics.median(lengths):g}, max {max(lengths)}; limit "
        f"{source.limit} (rollout.max_prompt_length)",
        *[f"  opened    `{source.opened.strip()}`: a response continues the thought that the prompt has opened{limit}"]
        * bool(source.opened),
        *[f"  opened    no thought: a response may begin with one{limit}"] * bool(limit and not source.opened),
        f"  {'truncated' if source.overlong == 'truncate_left' else 'dropped':9} {_dropped(source)}",
        *[f"  skipped   {source.num_bad}: bad rows (data.bad_rows)"] * bool(source.num_bad),
        f"  prompt    of row {source.row}, {source.num_tokens} tokens:",
    ]
    return "\n".join([*lines, *_shown(source.text)])


def _shown(text: str) -> list[str]:
    """Return the first lines of a rendered prompt."""
    lines = text.split("\n")
    shown = [f"    | {one_line(line)[:SHOWN_WIDTH]}".rstrip() for line in lines[:SHOWN_LINES]]
    return [*shown, f"    | ... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else shown


def _dropped(source: SourceTrial) -> str:
    if not source.num_overlong:
        return "none"
    first = next(row for row, length in enumerate(source.lengths) if length > source.limit)
    return (
        f"{source.num_overlong} of {len(source.lengths)}: longer than the limit, first row {first} "
        "(data.overlong_prompts)"
    )


def rewards_text(result: DryRun) -> str:
    """Return a table of the reward functions per data set, then the warnings."""
    lines = [line for source in result.sources for line in _table(source.key, result.rewards)]
    lines += [f"  {line}" for line in result.not_called]
    if result.request:
        num_tokens, text = result.request
        lines += [f"agent's first request, {num_tokens} tokens:", *_shown(text), ""]
    if result.tools:
        lines.append(f"tools: {', '.join(result.tools)}")
    lines += [f"warning: {warning}" for warning in result.warnings]
    if not result.problems and not result.warnings:
        lines.append(f"no problem found; the plan is valid on {result.ranks} rank(s)")
    return "\n".join(lines)


def _table(key: str, rewards: list[RewardTrial]) -> list[str]:
    """Return one line per reward function: weight, counts of rows, mean values, milliseconds. Then where and how it
    reads the gold."""
    trials = [trial for trial in rewards if trial.data == key]
    if not trials:
        return []
    width = max(len(trial.function) for trial in trials)
    lines = [f"rewards of {key}, mean values on {max(trial.rows for trial in trials)} rows"]
    lines.append(f"  {'':{width}}  weight  gold best  unscored    gold   other   empty      ms")
    for trial in trials:
        values = "  ".join(f"{_value(value):>6}" for value in (trial.gold, trial.other, trial.empty))
        best = f"{trial.best}/{trial.rows}" if trial.column else "-"
        lines.append(
            f"  {trial.function:{width}}  {trial.weight:6g}  {best:>9}  {trial.unscored:8}  {values}  "
            f"{trial.milliseconds:6.1f}"
        )
    lines += [f"  {trial.function:{width}}  {note}" for trial in trials for note in _notes(trial)]
    return [*lines, ""]


def _notes(trial: RewardTrial) -> Iterator[str]:
    if trial.form:
        form = trial.form.replace("I work it out.", "...").replace("\n", " ").strip()
        yield f"reads `{trial.column}`{f' from {form}' if form != 'GOLD' else ''}"
    if not trial.column:
        yield "no column with a right answer is known, so none was tried"
    if trial.rows < trial.num_rows and not trial.failure:
        yield f"was tried on {trial.rows} of {trial.num_rows} rows, because it is slow or asks a server"


def _value(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
