"""The interface of a run's recorders: dumps, the token log, completions and the speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.train_types import LossFn, Metric, TrainBatch


@dataclass(frozen=True)
class TrainedRollouts:
    """The trajectories that a step trains on, and the advantage of each, with roles of each of their samples. Steps are
    counted from 1."""

    step: int
    samples: StepSamples
    advantages: list[float]
    of_turns: np.ndarray | None = None  # [K] float64, the advantages of `samples.turns`

    def turn_advantages(self, trajectory: int) -> list[float] | None:
        """Return the advantages of the turns of this trajectory, in order; None without `algorithm.advantage_by`."""
        if self.of_turns is None:
            return None
        rows: list[float] = self.of_turns[self._borders[trajectory] : self._borders[trajectory + 1]].tolist()
        return rows

    def of_branches(self, trajectory: int) -> list[float]:
        """Return the advantages of the branches of this trajectory, in order; none without roles."""
        if not self.samples.columns.roles or self.samples.branches is None:
            return []
        first, stop = len(self.samples) + self._branches[trajectory : trajectory + 2]
        return self.advantages[first:stop]

    @cached_property
    def _branches(self) -> np.ndarray:
        return np.append(0, self.samples.facts["branches"].cumsum())

    @cached_property
    def _borders(self) -> np.ndarray:
        return np.append(0, self.samples.turn_counts.cumsum())


@dataclass
class Update:
    """One optimizer step: its inputs, and its metrics."""

    batch: TrainBatch
    loss_fn: LossFn
    denominator: int
    metrics: dict[str, Metric] = field(default_factory=dict)


class Recorder:
    """Records each step of a run, in this order: `begin`, for each optimizer step `wrap_loss` and `after_update`, then
    `after_training` and `finish`. All methods are collective, and do nothing by default."""

    def begin(self, rollouts: TrainedRollouts) -> None:
        """Begin a step, before its first optimizer step."""

    def wrap_loss(self, loss_fn: LossFn) -> LossFn:
        """Return `loss_fn`, or a wrapper that records the inputs of one optimizer step."""
        return loss_fn

    def after_update(self, update: Update) -> None:
        """Record the result of an optimizer step. Metrics without `grad_norm` mean that it was skipped."""

    def after_training(self, rollouts: TrainedRollouts) -> None:
        """Record the rollouts after the last optimizer step, before the weight sync."""

    def finish(self, rollouts: TrainedRollouts) -> None:
        """End the step, after the weight sync."""


@dataclass(frozen=True)
class Recorders(Recorder):
    """Calls each recorder of a run, in order."""

    each: Sequence[Recorder] = ()

    def begin(self, rollouts: TrainedRollouts) -> None:
        for recorder in self.each:
            recorder.begin(rollouts)

    def wrap_loss(self, loss_fn: LossFn) -> LossFn:
        for recorder in self.each:
            loss_fn = recorder.wrap_loss(loss_fn)
        return loss_fn

    def after_update(self, update: Update) -> None:
        for recorder in self.each:
            recorder.after_update(update)

    def after_training(self, rollouts: TrainedRollouts) -> None:
        for recorder in self.each:
            recorder.after_training(rollouts)

    def finish(self, rollouts: TrainedRollouts) -> None:
        for recorder in self.each:
            recorder.finish(rollouts)
