"""Defines the options of experiment trackers, and checks `run.trackers`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from megagrpo.config.basics.paths import is_user_code
from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.section import Section
from megagrpo.suggestions import did_you_mean

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

# built-in trackers, and the packages that they import; some come with the extra of the same name
TRACKER_PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
BUILT_IN_TRACKERS = tuple(TRACKER_PACKAGES)
EXAMPLE_TRACKERS = {  # below examples/trackers
    "mlflow": "mlflow_sink.py:MlflowSink",
    "otel": "otel.py:OtelSink",
    "prometheus": "prometheus.py:PrometheusSink",
}
PROJECT = "megagrpo"  # project or experiment when neither the config nor the environment names one


class WandbSection(Section):
    mode: Literal["online", "offline"] | None = None
    """offline: write to the run's folder without an account; `wandb sync` uploads it. Empty: `WANDB_MODE` or online."""
    project: str | None = None
    """Project. Empty: `WANDB_PROJECT`, or megagrpo."""
    entity: str | None = None
    """User or team. Empty: `WANDB_ENTITY`, or your account's default."""
    group: str | None = None
    """Group of the run. Empty: `WANDB_RUN_GROUP`, or none."""
    tags: list[str] = []
    """Tags of the run."""
    name: str | None = None
    """Name of the run in wandb. Empty: `run.name`."""


class TrackioSection(Section):
    project: str | None = None
    """Project. Empty: `TRACKIO_PROJECT`, or megagrpo."""
    group: str | None = None
    """Group of the run."""
    space_id: str | None = None
    """Hugging Face Space that receives the run. Empty: `TRACKIO_SPACE_ID`, or trackio's local database."""
    name: str | None = None
    """Name of the run in trackio. Empty: `run.name`."""


def tracker_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield names in `run.trackers` that are neither a tracker nor a class of the user, and repeated names."""
    for index, name in enumerate(config.run.trackers):
        key = (f"run.trackers.{index}",)
        if name in config.run.trackers[:index]:
            yield Problem(key, f"`{name}` is listed twice; remove one")
        elif name in EXAMPLE_TRACKERS:
            file = f"examples/trackers/{EXAMPLE_TRACKERS[name]}"
            yield Problem(key, f"`{name}` is a file of the repository; name it as {file} (docs/trackers.md)")
        elif name not in BUILT_IN_TRACKERS and not is_user_code(name):
            known = f"known: {', '.join(BUILT_IN_TRACKERS)}; your own: path/file.py:Class or package.module:Class"
            yield Problem(key, f"`{name}` is not a known tracker{did_you_mean(name, BUILT_IN_TRACKERS)}; {known}")


def missing_package(name: str) -> str:
    """Return which missing package makes the built-in tracker `name` unusable on this machine; "" if all are there."""
    absent = [package for package in TRACKER_PACKAGES[name] if not _installed(package)]
    if not absent:
        return ""
    needed = f"`{name}` needs {', '.join(absent)}, which is not installed: pip install {' '.join(absent)}"
    return f"{needed}; or remove it from run.trackers"


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def tracker_notes(trackers: Sequence[str]) -> list[Problem]:
    """Return the `run.trackers` whose packages are not installed on this machine; the run's machine may differ."""
    found = [(index, name) for index, name in enumerate(trackers) if name in TRACKER_PACKAGES]
    return [Problem((f"run.trackers.{index}",), why) for index, name in found if (why := missing_package(name))]
