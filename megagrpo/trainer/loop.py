"""The loop of every method: steps, with what the lifecycle does around them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from megagrpo.train_types import TrainState
from megagrpo.trainer.lifecycle import Lifecycle
from megagrpo.trainer.recording import Records


class Loop(ABC):
    """A method's training loop. Its `step` reads as the algorithm; `state` is what a checkpoint restores."""

    state: TrainState
    records: Records
    lifecycle: Lifecycle

    @abstractmethod
    def step(self) -> dict[str, float]:
        """Run one training step. Returns its metrics, the same on every rank. Raises StopRequested before training."""

    @abstractmethod
    def advance(self) -> None:
        """Count the step as finished."""

    @property
    def synced(self) -> Mapping[str, float]:
        """Metrics of the last weight sync, if the method has one."""
        return {}

    def run(self) -> int:
        """Run `run.num_steps` steps, or until a request to stop, with evaluations and checkpoints in between.

        Returns 0, or the number of the signal that asked to stop.
        """
        with self.lifecycle.endings():
            self.lifecycle.begin()
            while self.lifecycle.begin_step():
                with self.records.profiler.step(self.state.step + 1):
                    metrics = self.step()
                self.advance()
                self.lifecycle.end_step(metrics, dict(self.synced))
            self.lifecycle.finish()
        return self.lifecycle.stopped_by
