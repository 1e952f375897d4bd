"""Finds the trackers of `run.trackers`: built-in ones with their packages, and classes of the user."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from megagrpo.config import Problem, ProblemError, RunSection
from megagrpo.config.sections.tracker_options import missing_package, tracker_notes
from megagrpo.platform.process import user_code
from megagrpo.records.rows.completions import Rows
from megagrpo.records.sinks.sink import ServerMetrics, Sink, TrackedRun, TrackerSink

CLASSES = {"tensorboard": "TensorBoardSink", "wandb": "WandbSink", "trackio": "TrackioSink"}


def make_sink(name: str, run: TrackedRun) -> Sink:
    """Return the sink of one `run.trackers` entry. May raise anything: service clients and the user's code run here."""
    if name not in CLASSES:
        own = load_class(name)(run)
        return own if isinstance(own, TrackerSink) else OwnSink(own)
    if why := missing_package(name):
        raise RuntimeError(why)
    sink: Sink = getattr(importlib.import_module(f"megagrpo.records.sinks.{name}"), CLASSES[name])(run)
    return sink


def check_trackers(trackers: Sequence[str]) -> None:
    """Import the user's classes, and look for the others' packages. Raises ProblemError with every unusable tracker."""
    problems = tracker_notes(trackers)
    for index, name in enumerate(trackers):
        try:
            if name not in CLASSES:
                load_class(name)
        except ValueError as error:
            problems.append(Problem((f"run.trackers.{index}",), f"`{name}` {error}"))
    if problems:
        raise ProblemError(*problems)


def unused_options(run: RunSection) -> list[str]:
    """Return a note for each tracker that has options but is not in `run.trackers`."""
    sections = {name: section for name, section in run if name in CLASSES}
    return [
        f"note: run.{name} has options, but run.trackers does not name {name}, so the run does not use it"
        for name, section in sections.items()
        if name not in run.trackers and section != type(section)()
    ]


SINK_METHODS = {  # name -> parameters, without optional ones
    name: [p.name for p in inspect.signature(getattr(Sink, name)).parameters.values() if p.default is p.empty]
    for name in ("step", "evaluation", "completions", "message", "close")
}


class OwnSink:
    """Calls the methods that the user's object defines; others do nothing. `phase`, `follow` and the argument of
    `close` are those of `MetricsWriter`."""

    def __init__(self, sink: Any):
        self._sink = sink

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._call("step", step, dict(metrics))

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._call("evaluation", step, dict(metrics))

    def completions(self, step: int, rows: Rows) -> None:
        if hasattr(self._sink, "completions"):
            self._sink.completions(step, [dict(row) for row in rows])

    def message(self, text: str) -> None:
        self._call("message", text)

    def phase(self, name: str, start: float, stop: float) -> None:
        self._call("phase", name, start, stop)

    def follow(self, servers: ServerMetrics) -> None:
        self._call("follow", servers)

    def close(self, failed: bool = False) -> None:
        takes = inspect.signature(getattr(self._sink, "close", self.message)).parameters
        self._call("close", *([failed] if "failed" in takes else []))

    def _call(self, name: str, *arguments: Any) -> None:
        if (method := getattr(self._sink, name, None)) is not None:
            method(*arguments)


def load_class(name: str) -> type[Any]:
    """Import the class that `name` names: `path/file.py:Class` or `package.module:Class`.

    Raises ValueError with the violated rule for a class that a run cannot use.
    """
    sink = user_code.load_named(name)
    if not isinstance(sink, type):
        raise ValueError("is not a class; name a class with methods such as step: docs/trackers.md")
    methods = {name: getattr(sink, name) for name in SINK_METHODS if callable(getattr(sink, name, None))}
    if not methods:
        raise ValueError(f"defines no method that a run calls: {', '.join(SINK_METHODS)}")
    try:
        inspect.signature(sink).bind(None)
    except TypeError as error:
        raise ValueError(f"cannot be constructed: {error}; write __init__(self, run): docs/trackers.md") from None
    for name, method in methods.items():
        try:
            inspect.signature(method).bind(*SINK_METHODS[name])
        except TypeError as error:
            written = f"{name}({', '.join(SINK_METHODS[name])})"
            raise ValueError(f"cannot be called: {name}: {error}; write {written}: docs/trackers.md") from None
    return sink
