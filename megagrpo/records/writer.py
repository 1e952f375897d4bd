"""Writes a run's metrics, completions and messages to the console, the JSONL files and the trackers of `run.trackers`.

A sink that fails is reported once and never stops training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megagrpo.config import RunConfig
from megagrpo.platform.parallel.bulk_messages import PartError
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.terminal import warn
from megagrpo.records.console import ConsoleSink
from megagrpo.records.rows.completions import Rows, completion_lines
from megagrpo.records.rows.jsonl_file import JsonlFile, StoredRows
from megagrpo.records.rows.recorder import Recorder, TrainedRollouts
from megagrpo.records.rows.step_metrics import split_layers
from megagrpo.records.sinks.find_trackers import make_sink
from megagrpo.records.sinks.sink import ServerMetrics, Sink, TrackedRun

CONSOLE, JSONL = "console", "metrics.jsonl and completions.jsonl"
RETRIED = (CONSOLE, JSONL, "tensorboard")  # sinks of local files: a write that fails on a full disk may succeed later


class MetricsWriter:
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
        """Write the metrics of one finished training step. Those of single layers go to `metrics.jsonl` only."""
        scalars, by_layer = split_layers(metrics)
        for name in list(self._sinks):
            self._call(name, "step", step, scalars | by_layer if name == JSONL else scalars)

    def completions(self, step: int, lines: Iterable[bytes]) -> None:
        """Write the responses of one step, whose lines come in parts: first to `completions.jsonl`, from which the
        other sinks read them."""
        rows: Rows = ()
        if isinstance(files := self._sinks.get(JSONL), JsonlSink):
            try:
                rows = files.store(lines)
            except Exception as error:
                self._failed_sink(JSONL, error)
        with suppress(PartError):
            for _ in lines:  # the rest after an error: other ranks wait until their lines are taken
                pass
        self._each("completions", step, rows)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of the held-out prompts after `step` steps, under `eval/`."""
        named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in metrics.items()}
        self._each("evaluation", step, named)

    def phase(self, name: str, start: float, stop: float) -> None:
        """Pass a phase that has ended to the sinks that take phases; times are those of `time.perf_counter`."""
        self._each_with("phase", name, start, stop)

    def follow(self, servers: ServerMetrics) -> None:
        """Pass the run's vLLM servers to the sinks that show their metrics."""
        self._each_with("follow", servers)

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
        for name in list(self._sinks):
            self._call(name, method, *arguments)

    def _each_with(self, method: str, *arguments: Any) -> None:
        """Like `_each`, for a method that only some sinks have."""
        for name in [name for name, sink in self._sinks.items() if hasattr(sink, method)]:
            self._call(name, method, *arguments)

    def _call(self, name: str, method: str, *arguments: Any) -> None:
        try:
            getattr(self._sinks[name], method)(*arguments)
        except Exception as error:
            self._failed_sink(name, error)

    def _failed_sink(self, name: str, error: Exception) -> None:
        """Report a sink that raised, and no longer call it unless the next call may succeed."""
        self._warn(name, error)
        if not (isinstance(error, OSError) and name in RETRIED):
            del self._sinks[name]

    def _warn(self, name: str, error: Exception) -> None:
        if name in self._failed:
            return
        self._failed.add(name)
        warn(f"warning: {name} failed and may be incomplete; training continues. {type(error).__name__}: {error}")


@dataclass(frozen=True)
class CompletionsLog(Recorder):
    """Writes every response of a step, with its rewards and its advantage, through the writer of rank 0."""

    layout: Layout
    writer: MetricsWriter

    def finish(self, rollouts: TrainedRollouts) -> None:
        """Send the lines of the responses that this rank sampled to rank 0, which writes them. Collective."""
        self.writer.completions(rollouts.step, completion_lines(self.layout, rollouts))


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
