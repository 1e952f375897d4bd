"""Finds the trackers of `run.trackers`: built-in ones with their packages, and classes of the user."""

from __future__ import annotations

import importlib

from megagrpo.config import Problem, ProblemError, RunConfig, RunSection
from megagrpo.config.tracker_options import missing_package, tracker_notes
from megagrpo.records.sinks.sink import Sink, TrackedRun
from megagrpo.records.sinks.user_sink import OwnSink, load_class

CLASSES = {"tensorboard": "TensorBoardSink", "wandb": "WandbSink", "mlflow": "MlflowSink", "trackio": "TrackioSink"}


def make_sink(name: str, run: TrackedRun) -> Sink:
    """Return the sink of one `run.trackers` entry. May raise anything: service clients and the user's code run here."""
    if name not in CLASSES:
        return OwnSink(name, run)
    if why := missing_package(name):
        raise RuntimeError(why)
    sink: Sink = getattr(importlib.import_module(f"megagrpo.records.sinks.{name}"), CLASSES[name])(run)
    return sink


def check_trackers(config: RunConfig) -> None:
    """Import the user's classes, and look for the others' packages. Raises ProblemError with every unusable tracker."""
    problems = tracker_notes(config)
    for index, name in enumerate(config.run.trackers):
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
