"""Writes a checkpoint in the foreground, as the last one of a run."""

from pathlib import Path

from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.train_types import TrainState


def save_now(saver: Checkpointer, state: TrainState) -> Path:
    """Write `step_N` and return its path. Collective. Raises CheckpointError on every rank."""
    saver.start(state, background=False)
    path = saver.finish(wait=True)
    assert path is not None, "a checkpoint was in progress"
    return path
