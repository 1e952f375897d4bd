"""Finds the trackers of `run.trackers`: built-in ones with their packages, and classes of the user."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from megagrpo.config import Problem, ProblemError, RunConfig
from megagrpo.records.sinks.own import OwnSink, load_class
from megagrpo.records.sinks.sink import Sink, TrackedRun


@dataclass(frozen=True)
class Tracker:
    """A built-in tracker: its class in `records/sinks/`, and the packages that it imports."""

    name: str
    class_name: str
    packages: tuple[str, ...]
    extra: str | None = None  # the extra of megagrpo that installs the packages; None: always installed


TRACKERS = {
    tracker.name: tracker
    for tracker in (
        Tracker("tensorboard", "TensorBoardSink", ("tensorboard",)),
        Tracker("wandb", "WandbSink", ("wandb",), "wandb"),
        Tracker("mlflow", "MlflowSink", ("mlflow", "sqlalchemy", "alembic"), "mlflow"),
        Tracker("trackio", "TrackioSink", ("trackio",), "trackio"),
    )
}


def make_sink(name: str, run: TrackedRun) -> Sink:
    """Return the sink of one entry of `run.trackers`. May raise anything: clients of services and the user's code run here."""
    tracker = TRACKERS.get(name)
    if tracker is None:
        return OwnSink(name, run)
    if why := _missing(tracker):
        raise RuntimeError(why)
    sink: Sink = getattr(importlib.import_module(f"megagrpo.records.sinks.{name}"), tracker.class_name)(run)
    return sink


def check_trackers(config: RunConfig) -> None:
    """Import the user's classes, and look for the packages of the others. Raises ProblemError with every tracker that cannot be used."""
    problems: list[Problem] = []
    for index, name in enumerate(config.run.trackers):
        try:
            tracker = TRACKERS.get(name)
            why = _missing(tracker) if tracker else ""
            if tracker is None:
                load_class(name)
        except ValueError as error:
            why = f"`{name}` {error}"
        if why:
            problems.append(Problem((f"run.trackers.{index}",), why))
    if problems:
        raise ProblemError(*problems)


def _missing(tracker: Tracker) -> str:
    """Return why a tracker cannot be used here: a package that is not installed; "" if all are."""
    absent = [package for package in tracker.packages if importlib.util.find_spec(package) is None]
    if not absent:
        return ""
    package = f"megagrpo[{tracker.extra}]" if tracker.extra else absent[0]
    return f"`{tracker.name}` needs {', '.join(absent)}, which is not installed: pip install '{package}'; or remove it from run.trackers"


def unused_options(config: RunConfig) -> list[str]:
    """Return a note for each tracker that has options but is not in `run.trackers`."""
    sections = {name: section for name, section in config.run if name in TRACKERS}
    return [
        f"note: run.{name} has options, but run.trackers does not name {name}, so the run does not use it"
        for name, section in sections.items()
        if name not in config.run.trackers and section != type(section)()
    ]
