"""Checks data, prompts and rewards of CONFIG in seconds, without weights or a server.

    megagrpo check my_run.yaml
    megagrpo check my_run.yaml rollout.max_prompt_length=256 --json

Prints rows and columns of each data set, one rendered prompt, the lengths of all prompts and how many are dropped, and what each reward
gives for the right answer and for an empty completion. Reward models (model:PATH) are loaded with --models only. Exit code 0: no problem,
2: the listed problems must be solved before the run can train.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING

from megagrpo.commands.config_arguments import add_config, config_path, load
from megagrpo.config import ConfigError
from megagrpo.config.io import listed
from megagrpo.process.imports import without_garbage_collection
from megagrpo.process.terminal import one_line, show

if TYPE_CHECKING:
    from megagrpo.trainer.dry_run import DryRun, RewardTrial, SourceTrial

BINS, BAR = 6, 40  # rows of a histogram, and characters of its longest bar
SHOWN_LINES, SHOWN_WIDTH = 24, 96  # of a rendered prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo check`."""
    add_config(parser)
    parser.add_argument("--models", action="store_true", help="also load and call reward models")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what was tried. Raises ConfigError with all problems."""
    config, path = load(options), config_path(options)
    with without_garbage_collection():
        from transformers.utils.logging import disable_progress_bar

        from megagrpo.trainer.dry_run import dry_run
    disable_progress_bar()
    result = dry_run(config, path.parent, options.models)
    if options.json:
        show(json.dumps(asdict(result), indent=1))
    else:
        for source in result.sources:
            show(source_text(source, config.rollout.prompts_per_step) + "\n")
        show(rewards_text(result))
    if result.problems:
        raise ConfigError(listed(options.config, result.problems))
    return 0


def source_text(source: SourceTrial, prompts_per_step: int) -> str:
    """Return rows, columns, lengths and one rendered prompt of a data set."""
    lengths, usable = source.lengths, source.num_usable
    epoch = f", an epoch is {usable / prompts_per_step:.1f} steps" if source.key == "data.train" else ""
    lines = [
        f"{source.key}: {source.source}",
        f"  rows      {len(lengths)}{epoch}",
        f"  columns   {source.prompt_column} (prompt), for rewards: {', '.join(source.columns) or 'none'}",
        f"  tokens    min {min(lengths)}, median {statistics.median(lengths):g}, max {max(lengths)}; "
        f"limit {source.limit} (rollout.max_prompt_length)",
        *histogram(lengths),
        f"  {'truncated' if source.overlong == 'truncate_left' else 'dropped':9} {_dropped(source)}",
        f"  prompt    of row {source.row}, {source.num_tokens} tokens:",
    ]
    text = source.text.split("\n")
    lines += [f"    | {one_line(line)[:SHOWN_WIDTH]}".rstrip() for line in text[:SHOWN_LINES]]
    return "\n".join([*lines, f"    | ... {len(text) - SHOWN_LINES} more lines"] if len(text) > SHOWN_LINES else lines)


def _dropped(source: SourceTrial) -> str:
    if not source.num_overlong:
        return "none"
    first = next(row for row, length in enumerate(source.lengths) if length > source.limit)
    return f"{source.num_overlong} of {len(source.lengths)}: longer than the limit, first row {first} (data.overlong_prompts)"


def histogram(lengths: list[int]) -> list[str]:
    """Return one line per range of lengths, with a bar and the number of prompts."""
    low, high = min(lengths), max(lengths)
    width = (high - low) // BINS + 1
    counts = [sum(start <= length < start + width for length in lengths) for start in range(low, high + 1, width)]
    names = [f"{start}-{min(start + width - 1, high)}" if width > 1 else f"{start}" for start in range(low, high + 1, width)]
    return [
        f"    {name:>11}  {'#' * max(round(BAR * count / max(counts)), int(count > 0))} {count}".rstrip()
        for name, count in zip(names, counts, strict=True)
    ]


def rewards_text(result: DryRun) -> str:
    """Return one line per reward function: weight, value and milliseconds for each completion."""
    lines = []
    if result.rewards:
        width = max(len(trial.function) for trial in result.rewards)
        lines.append("rewards, called with the row of the first prompt")
        lines.append(f"  {'':{width}}  weight  completion                        value         ms")
        for trial in sorted(result.rewards, key=lambda trial: trial.completion):
            lines.append(
                f"  {trial.function:{width}}  {trial.weight:6g}  {_completion(trial):32}  {_value(trial):>6}  {trial.milliseconds:9.1f}"
            )
    lines += [f"  {name}: not called, because it loads a reward model; add --models" for name in result.not_called]
    if result.tools:
        lines.append(f"tools: {', '.join(result.tools)}")
    lines += [f"warning: {warning}" for warning in result.warnings]
    if not result.problems and not result.warnings:
        lines.append(f"no problem found; the plan is valid on {result.ranks} rank(s)")
    return "\n".join(lines)


def _completion(trial: RewardTrial) -> str:
    if not trial.text:
        return "empty"
    text = one_line(trial.text)
    return f"`{trial.column}`: {text if len(text) <= 18 else text[:15] + '...'}"


def _value(trial: RewardTrial) -> str:
    return "failed" if trial.failure else "none" if trial.value is None else f"{trial.value:.4g}"
