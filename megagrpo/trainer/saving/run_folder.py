"""The folder of a run: a fresh start, a resumed run, or a job that its scheduler restarted."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megagrpo.config import RunConfig, save_resolved
from megagrpo.platform.parallel.agree import on_first_rank
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.platform.process.terminal import show
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.records.checkpoints.checkpoint import CheckpointError, checked
from megagrpo.records.checkpoints.run_files import CHECKPOINTS, FROM_PYTHON, newest_checkpoint, next_free
from megagrpo.records.checkpoints.run_lock import LOCK, RunLock


@dataclass(frozen=True)
class RunFolder:
    """The locked folder of a run, and the checkpoint that the run continues from; None for a fresh start."""

    path: Path
    lock: RunLock
    resume_from: Path | None

    @property
    def restored_step(self) -> int:
        """The step of the checkpoint; 0 for a fresh start."""
        return 0 if self.resume_from is None else int(self.resume_from.name.removeprefix("step_"))


def open_run_folder(config: RunConfig, layout: Layout, resources: ExitStack) -> RunFolder:
    """Lock and prepare the run's folder, on rank 0. Collective. Raises the errors of `prepare_run_folder`."""
    lock = RunLock(Path(config.run.output_dir) / config.run.name)
    resources.callback(lock.release)
    job = ENVIRONMENT.get("MEGAGRPO_JOB")
    return RunFolder(lock.folder, lock, on_first_rank(layout, lambda: prepare_run_folder(config, lock, job)))


def prepare_run_folder(config: RunConfig, lock: RunLock, job: str | None = None) -> Path | None:
    """Create and lock the run's folder and write `resolved.yaml`. Returns the checkpoint to resume, None if fresh.

    A run that the same `job` began is continued, or started again when it has saved nothing yet. Raises ValueError when
    another process uses the folder, when the checkpoint to resume from is missing or damaged, or when a fresh start
    would mix with an earlier run.
    """
    lock.take()
    folder = lock.folder
    checkpoint = newest_checkpoint(folder / CHECKPOINTS)
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
    metrics = folder / "metrics.jsonl"
    if not resume and (checkpoint is not None or (metrics.exists() and metrics.stat().st_size > 0)):
        if not config.run.overwrite and not ours:
            raise ValueError(
                f"run.name: {folder} holds an earlier run; continue it with --resume, pick another name, or set "
                "run.overwrite=true"
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
