"""Defines the protocol of a sink: one output of a run's metrics and completions."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megagrpo.config import RunConfig
from megagrpo.records.rows.completions import Rows


@dataclass(frozen=True)
class TrackedRun:
    """The run whose metrics a sink gets: the argument of a sink's constructor."""

    folder: Path  # of the run's files
    config: RunConfig
    restored_step: int = 0  # the step of the checkpoint that the run continues from; 0: a new run

    @property
    def name(self) -> str:
        """The run's name, `run.name`."""
        return self.config.run.name

    def id(self, tracker: str) -> str:
        """Return this run's id in a tracker: the same after a restart, another one for a new run of the same name."""
        file = self.folder / f"{tracker}_id"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(uuid.uuid4().hex[:8])
        return file.read_text().strip()


class ServerMetrics(Protocol):
    """The vLLM servers of a run."""

    @property
    def urls(self) -> list[str]:
        """Their addresses, as they are now."""

    def metrics(self, url: str) -> bytes:
        """Return the text of a server's `/metrics`. May raise anything."""


class Sink(Protocol):
    """One output. Methods run on rank 0, in the order of the run. Any may raise; the writer catches the error."""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of a finished step, counted from 1."""

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of an evaluation after `step` steps. Their names begin with `eval/`."""

    def completions(self, step: int, rows: Rows) -> None:
        """Take the responses of a step, before its metrics. A row is a line of `completions.jsonl`."""

    def message(self, text: str) -> None:
        """Take a line for the user."""

    def close(self, failed: bool = False) -> None:
        """Flush, at the end of the run, which an error ended if `failed`. A sink of the user may lack the parameter."""


class TrackerSink:
    """Base class of trackers: ignores messages, and completions between the steps of `run.log_completions_steps`."""

    def __init__(self, run: TrackedRun):
        self._every = run.config.run.log_completions_steps

    def completions(self, step: int, rows: Rows) -> None:
        if rows and self._every and step % self._every == 0:
            self.table(step, rows)

    def table(self, step: int, rows: Rows) -> None:
        """Write the responses of a step."""

    def message(self, text: str) -> None:
        pass

    def step(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self, failed: bool = False) -> None:
        pass
