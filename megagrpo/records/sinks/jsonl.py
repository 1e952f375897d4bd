"""Writes `metrics.jsonl`, `completions.jsonl` and `messages.jsonl`, the source of truth for all other output."""

from __future__ import annotations

import time
from collections.abc import Iterable

from megagrpo.records.rows.completions import Rows
from megagrpo.records.rows.jsonl_file import JsonlFile, StoredRows
from megagrpo.records.sinks.sink import TrackedRun


class JsonlSink:
    """Writes `metrics.jsonl`, one line per step or evaluation, `completions.jsonl`, one line per rollout, and
    `messages.jsonl`, one line per message with the last finished step.

    Each call returns after its lines were passed to the kernel.
    """

    def __init__(self, run: TrackedRun):
        run.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = JsonlFile(run.folder / "metrics.jsonl", run.restored_step)
        self._completions = JsonlFile(run.folder / "completions.jsonl", run.restored_step)
        self._messages = JsonlFile(run.folder / "messages.jsonl", run.restored_step)
        self._last_step = run.restored_step

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._last_step = step
        self._metrics.append([{"step": step, "wall_time": round(time.time(), 3), **metrics}])

    evaluation = step

    def store(self, lines: Iterable[bytes]) -> StoredRows:
        """Write the lines of a step's responses, in parts, and return their rows."""
        return self._completions.store(lines)

    def completions(self, step: int, rows: Rows) -> None:
        """Do nothing: `store` has written the rows."""

    def message(self, text: str) -> None:
        self._messages.append([{"step": self._last_step, "wall_time": round(time.time(), 3), "text": text}])

    def close(self, failed: bool = False) -> None:
        for file in (self._metrics, self._completions, self._messages):
            file.close()
