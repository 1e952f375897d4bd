"""Reads a run's folder. Accepts files of older versions and of unfinished runs: a missing file or field is empty."""

from __future__ import annotations

import fcntl
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megagrpo.config import ConfigError
from megagrpo.config.basics.yaml_text import parse_yaml
from megagrpo.records.checkpoints.run_files import COMPLETIONS
from megagrpo.records.checkpoints.run_lock import LOCK

STEP = re.compile(rb'\{"step": (\d+)[,}]')
BUFFER = 1 << 20  # bytes read at once: a line may have 100 kB

Row = dict[str, Any]
Span = tuple[int, float]  # first byte, byte after the last one
WHOLE: tuple[Span] = ((0, math.inf),)


@dataclass
class StepLines:
    """The lines of a step in `completions.jsonl`: the number of responses, and the bytes where they begin and end."""

    start: int
    stop: int = 0
    count: int = 0


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's folder, without its responses.

    `steps` and `evaluations` are the lines of `metrics.jsonl` in order of steps; the last line of a step counts.
    `damaged` counts the lines of each file that cannot be read.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    messages: list[Row] = field(default_factory=list)
    starts: list[Row] = field(default_factory=list)
    running: bool = False
    damaged: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in the config, or the folder's."""
        return str(self.setting("run.name") or self.folder.resolve().name)

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the config; None if it is missing."""
        here: Any = self.config
        for part in key.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        return here

    @property
    def group_sizes(self) -> dict[str, int]:
        """The responses to a prompt of each task, by the task's name; "" without tasks. Empty if the config lacks
        them."""
        tasks = [task for task in self.setting("tasks") or [{}] if isinstance(task, dict)]
        of_run = self.setting("rollout.num_generations")
        sizes = {
            str(task.get("name", "")): (task.get("rollout") or {}).get("num_generations", of_run) for task in tasks
        }
        return {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}

    @cached_property
    def responses(self) -> dict[int, StepLines]:
        """The lines of each step in `completions.jsonl`."""
        return lines_per_step(self.folder / COMPLETIONS)

    @property
    def last_start(self) -> Row:
        """The facts of the newest start; empty for a run of an older version."""
        return self.starts[-1] if self.starts else {}


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder. Raises ConfigError when it is not a run's folder or holds no metrics yet."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name the folder of a run, such as runs/quickstart")
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ConfigError(
            f"{folder}: holds no metrics.jsonl, so it is not the folder of a run; name a folder such as runs/quickstart"
        )
    damaged: dict[str, int] = {}
    steps: dict[int, Row] = {}
    evaluations: dict[int, Row] = {}
    for row in read_lines(metrics, damaged):
        rows = evaluations if any(name.startswith("eval/") for name in row) else steps
        rows[row["step"]] = row
    if not steps and not evaluations:
        raise ConfigError(f"{folder}: metrics.jsonl holds no step yet; run the report after the first step")
    return RunFiles(
        folder=folder,
        config=_read_config(folder / "resolved.yaml", damaged),
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[evaluations[step] for step in sorted(evaluations)],
        messages=list(read_lines(folder / "messages.jsonl", damaged)),
        starts=list(read_lines(folder / "starts.jsonl", damaged)),
        running=_is_locked(folder / LOCK),
        damaged=damaged,
    )


def read_lines(file: Path, damaged: dict[str, int]) -> Iterator[Row]:
    """Yield a file's JSON objects that have a step; nothing if the file is missing.

    Lines that cannot be read are counted in `damaged`. The end of the last line of a run in progress may be missing.
    """
    for _, line in lines_of(file):
        if (row := parsed(line, file.name, damaged)) is not None:
            yield row


def lines_of(file: Path, spans: Iterable[Span] = WHOLE) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in spans of bytes, each after its first byte. Nothing if the file is missing."""
    if not file.is_file():
        return
    place = 0
    with open(file, "rb", buffering=BUFFER) as lines:
        for start, stop in sorted(spans):
            if start > place:
                place = lines.seek(int(start))
            while place < stop and (line := lines.readline()):
                yield place, line
                place += len(line)


def parsed(line: bytes, name: str, damaged: dict[str, int]) -> Row | None:
    """Return the JSON object of a line; None, counted in `damaged`, if it is none or has no step."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError("not a row with a step")
    except (ValueError, RecursionError):
        if line.strip():
            damaged[name] = damaged.get(name, 0) + 1
        return None
    return row


def lines_per_step(file: Path) -> dict[int, StepLines]:
    """Return step -> lines of `completions.jsonl`. A line without a step at its head belongs to the line before it."""
    steps: dict[int, StepLines] = {}
    step = StepLines(0)
    for place, line in lines_of(file):
        if match := STEP.match(line):
            step = steps.setdefault(int(match[1]), StepLines(place))
            step.count += 1
        step.stop = place + len(line)
    return steps


def _read_config(file: Path, damaged: dict[str, int]) -> dict[str, Any]:
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, ConfigError):
        values = None
    if not isinstance(values, dict):
        damaged[file.name] = 1
        return {}
    return values


def _is_locked(file: Path) -> bool:
    """Whether a process holds the lock of the run's folder."""
    try:
        with open(file) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
