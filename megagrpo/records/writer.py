"""Writes a run's metrics, completions and messages to the console, the JSONL files and the trackers of `run.trackers`.

A sink that fails is reported once and never stops training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megagrpo.config import RunConfig
from megagrpo.platform.process.terminal import warn
from megagrpo.records.completions import completion_rows
from megagrpo.records.console import ConsoleSink
from megagrpo.records.recorder import Recorder, TrainedRollouts
from megagrpo.records.sinks.find_trackers import make_sink
from megagrpo.records.sinks.jsonl import JsonlSink
from megagrpo.records.sinks.sink import Sink, TrackedRun

CONSOLE, JSONL = "console", "metrics.jsonl and completions.jsonl"
RETRIED = (CONSOLE, JSONL, "tensorboard")  # sinks of local files: a write that fails on a full disk may succeed later


class MetricsWriter(Recorder):
    """Passes every call to each sink. A sink that raises is reported once on stderr and no longer called. A sink in
    RETRIED that raised OSError stays and gets the next call."""

    def __init__(self, run_folder: str | Path, config: RunConfig, restored_step: int = 0):
        """A resumed run continues after `restored_step`: lines of later steps are removed, since they are repeated."""
        run = TrackedRun(Path(run_folder), config, restored_step)
        self._sinks: dict[str, Sink] = {}
        self._failed: set[str] = set()
        self._add(CONSOLE, lambda: ConsoleSink(config))
        self._add(JSONL, lambda: JsonlSink(run))
        for name in config.run.trackers:
            self._add(name, partial(make_sink, name, run))

    @classmethod
    def silent(cls) -> MetricsWriter:
        """Return a writer without sinks, for ranks that do not report."""
        writer = cls.__new__(cls)
        writer._sinks, writer._failed = {}, set()
        return writer

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of one finished training step."""
        self._each("step", step, metrics)

    def finish(self, rollouts: TrainedRollouts) -> None:
        """Write every rollout of one step, with its rewards and its advantage."""
        self._each("completions", rollouts.step, completion_rows(rollouts.step, rollouts.scored, rollouts.advantages))

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of the held-out prompts after `step` steps, under `eval/`."""
        named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in metrics.items()}
        self._each("evaluation", step, named)

    def message(self, text: str) -> None:
        """Write a line for the user."""
        self._each("message", text)

    def close(self, failed: bool = False) -> None:
        """Flush and close every sink. With `failed` an error ended the run, as wandb and MLflow then show."""
        self._each("close", failed)
        self._sinks = {}

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._sinks[name] = make()
        except Exception as error:
            self._warn(name, error)

    def _each(self, method: str, *arguments: Any) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                self._warn(name, error)
                if not (isinstance(error, OSError) and name in RETRIED):
                    del self._sinks[name]

    def _warn(self, name: str, error: Exception) -> None:
        if name in self._failed:
            return
        self._failed.add(name)
        warn(f"warning: {name} failed and may be incomplete; training continues. {type(error).__name__}: {error}")
