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
    identity = prompts.identity
    kept = identity.kept_rows(state.data) if identity else None
    if identity is None or kept is None:
        return None
    said = f"data.train is {described(identity.state())}; {path} was written with {described(state.data)}"
    if state.source:  # which names rows by their numbers
        raise ValueError(f"data.source: {said}; continue with the same data, or start a new run")
    action = "its new rows join the epoch in progress" if kept else "the epoch begins again with its rows"
    if resume != "other_data":
        raise ValueError(
            f"run.resume: {said}. Continue with the same data, or set run.resume: other_data, so that {action}"
        )
    return DataChange(kept, f"{said}: {action} (run.resume)")
