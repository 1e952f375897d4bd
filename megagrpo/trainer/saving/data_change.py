"""Compares `data.train` with the data set of the checkpoint that a run resumes from, before any server starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megagrpo.data.sources.data_identity import described
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.platform.parallel.agree import on_first_rank
from megagrpo.platform.parallel.layout import Layout
from megagrpo.records.checkpoints.checkpoint import checked
from megagrpo.train_types import TrainState


@dataclass(frozen=True)
class DataChange:
    """How a changed `data.train` continues: it begins with `kept` rows of the checkpoint, all or 0; `note` says it."""

    kept: int
    note: str


def data_change(prompts: PromptOrder, path: Path | None, resume: bool | str, layout: Layout) -> DataChange | None:
    """Return how data that has changed since the checkpoint `path` continues; None if nothing has. Collective.

    Raises ValueError for changed data without `run.resume: other_data`, and beside the state of a data source.
    """
    if path is None:
        return None
    return on_first_rank(layout, lambda: compare(prompts, checked(path)[2], path, resume))


def compare(prompts: PromptOrder, state: TrainState, path: Path, resume: bool | str) -> DataChange | None:
    """Like `data_change`, with the checkpoint's state, on the rank that reads the data set."""
    parts = prompts.parts(state)
    for key, order, saved in parts:
        identity = order.identity
        kept = identity.kept_rows(saved) if identity else None
        if identity is None or kept is None:
            continue
        said = f"{key} is {described(identity.state())}; {path} was written with {described(saved)}"
        if state.source or len(parts) > 1:  # a source names rows by their numbers, a mixture counts the rows of tasks
            names = "data.source" if state.source else "tasks"
            raise ValueError(f"{names}: {said}; continue with the same data, or start a new run")
        return _of_one(said, kept, resume)
    return None


def _of_one(said: str, kept: int, resume: bool | str) -> DataChange:
    """Return how a run of one data set continues. Raises ValueError without `run.resume: other_data`."""
    action = "its new rows join the epoch in progress" if kept else "the epoch begins again with its rows"
    if resume != "other_data":
        raise ValueError(
            f"run.resume: {said}. Continue with the same data, or set run.resume: other_data, so that {action}"
        )
    return DataChange(kept, f"{said}: {action} (run.resume)")
