"""Saves and restores a run: checkpoints in the foreground or the background, the best one, and failed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from megagrpo.config import ConfigError
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.records.checkpoints.checkpoint import Checkpointer, CheckpointError
from megagrpo.records.writer import MetricsWriter
from megagrpo.train_types import TrainState
from megagrpo.trainer.gpu.gpu_sharing import GpuTurns
from megagrpo.trainer.rollout.collector import Collector
from megagrpo.trainer.saving.data_change import DataChange
from megagrpo.trainer.saving.time_limit import TimeLimit


@dataclass
class Saves:
    """Writes and restores the run's checkpoints. All methods are collective.

    `state` is the trainer's own object: `restore` changes it in place. With `background` checkpoints are written while
    training continues, except the last one.
    """

    checkpointer: Checkpointer
    state: TrainState
    prompts: PromptOrder
    collector: Collector
    turns: GpuTurns
    time_limit: TimeLimit
    writer: MetricsWriter
    background: bool
    report: Callable[[Path], None] = lambda path: None  # gets each complete checkpoint
    resumed_from: Path | None = None  # the checkpoint that the run continues from
    # state in the newest checkpoint; a run at step 0 needs no checkpoint
    saved: TrainState = field(default_factory=TrainState)
    saving: TrainState | None = None  # state in the checkpoint that is being written
    failures: int = 0

    def save(self, must_succeed: bool) -> None:
        """Write a checkpoint, unless this step has one. A failure is reported and counted, and the run goes on. With
        `must_succeed`, for the last checkpoint of a run, it is written in the foreground and a failure is raised."""
        self.finish(wait=True)
        if self.state.step == self.saved.step:
            return
        with self.turns.checkpoint(last=must_succeed), self.turns.phases("save"):
            background = self.background and not must_succeed
            self.saving = replace(self.state)
            with self._counting_failures(must_succeed):
                self.checkpointer.start(self.saving, background, self.collector.finished_ahead())
            self.finish(wait=not background, must_succeed=must_succeed)

    def finish(self, wait: bool, must_succeed: bool = False) -> None:
        """Record the result of the checkpoint in progress, if it has ended. With `wait`, wait for its end."""
        with self._counting_failures(must_succeed):
            path = self.checkpointer.finish(wait)
            if path is not None and self.saving is not None:
                self.saved, self.saving = self.saving, None
                # In the background, a stop may have to wait for a checkpoint that has just begun, and then for the last
                # one.
                self.time_limit.saved(self.checkpointer.seconds * (2 if self.background else 1))
                self.writer.message(f"checkpoint {path}")
                self.report(path)

    def save_if_best(self, metric: str, evaluation: dict[str, float]) -> None:
        """Save a checkpoint if `metric` exceeds all earlier evaluations of a trained model. Keep it until a better one.

        Raises ConfigError before the first step without this metric. A later evaluation without it is not the best.
        """
        self.finish(wait=True)  # the checkpoint in progress may hold the best weights
        state = self.state
        if state.step == 0 and metric not in evaluation:
            raise ConfigError(
                f"evaluation.keep_best: no metric `{metric}`; evaluations have {', '.join(sorted(evaluation))}"
            )
        if (
            state.step == 0
            or metric not in evaluation
            or (state.best_value is not None and evaluation[metric] <= state.best_value)
        ):
            return
        state.best_step, state.best_value = state.step, evaluation[metric]
        self.save(must_succeed=False)

    def restore(self, path: Path, change: DataChange | None = None) -> None:
        """Continue from the checkpoint at `path`; `change` is that of `data.train` since then."""
        state, loaded = self.state, self.checkpointer.load(path)
        for name in (f.name for f in fields(TrainState)):
            setattr(state, name, getattr(loaded, name))
        self.saved = replace(state)
        self.prompts.restore(state)
        if change is None:
            self.collector.restore_ahead(path, state.ahead)
        else:  # groups that were generated ahead belong to other places of the stream
            self.prompts.join(state, change.kept)
        state.ahead, self.resumed_from = [], path
        self.collector.step = state.step
        self.writer.message(f"resumed from {path} after step {state.step}")

    @contextmanager
    def _counting_failures(self, must_succeed: bool) -> Iterator[None]:
        """Report and count a failed checkpoint, no longer the best. Raises CheckpointError with `must_succeed`."""
        try:
            yield
        except CheckpointError as error:
            if must_succeed:
                raise
            self.failures += 1
            self.state.best_step, self.state.best_value = self.saved.best_step, self.saved.best_value
            self.writer.message(f"warning: {error}")
