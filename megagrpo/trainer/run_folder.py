"""The folder of a run: a fresh start, a resumed run, or a job that its scheduler restarted."""

from __future__ import annotations

from pathlib import Path

from megagrpo.config import RunConfig, save_resolved
from megagrpo.platform.process.removal import remove
from megagrpo.platform.process.terminal import show
from megagrpo.records.checkpoint import CheckpointError, checked, newest_checkpoint
from megagrpo.records.run_files import FROM_PYTHON, next_free
from megagrpo.records.run_lock import LOCK, RunLock


def prepare_run_folder(config: RunConfig, lock: RunLock, job: str | None = None) -> Path | None:
    """Create and lock the run's folder and write `resolved.yaml`. Returns the checkpoint to resume from, None for a
    fresh start.

    A run that the same `job` began is continued, or started again when it has saved nothing yet. Raises ValueError when
    another process uses the folder, when the checkpoint to resume from is missing or damaged, or when a fresh start
    would mix with an earlier run.
    """
    lock.take()
    folder = lock.folder
    checkpoint = newest_checkpoint(folder / "checkpoints")
    begun_by = folder / "job"
    ours = job is not None and begun_by.exists() and begun_by.read_text() == job
    resume = checkpoint is not None if ours else config.run.resume
    if resume:
        if checkpoint is None:
            raise ValueError(f"run.resume: {folder} holds no complete checkpoint; start it without --resume")
        try:
            checked(checkpoint)
        except CheckpointError as error:
            raise ValueError(f"run.resume: {error}") from None
    if not resume and (checkpoint is not None or _has_text(folder / "metrics.jsonl")):
        if not config.run.overwrite and not ours:
            raise ValueError(
                f"run.name: {folder} holds an earlier run; continue it with --resume, pick another name, or set "
                f"run.overwrite=true"
            )
        aside = next_free(folder)
        try:
            folder.rename(aside)
        except OSError as error:
            raise ValueError(
                f"run.overwrite: {folder} cannot be moved to {aside}: {error.strerror}; set another run.name"
            ) from None
        show(f"the earlier run in {folder} was moved to {aside}" + (" (run.overwrite)" if config.run.overwrite else ""))
        remove(aside / LOCK)  # which this process holds
        lock.take()
        if (aside / FROM_PYTHON).exists():  # both runs' configs name files in it
            (aside / FROM_PYTHON).rename(folder / FROM_PYTHON)
    save_resolved(config, folder)
    if job is not None:
        begun_by.write_text(job)
    return checkpoint if resume else None


def _has_text(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
