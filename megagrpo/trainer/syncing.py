"""The weight syncs of a run: after each step, and again for servers that lost their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megagrpo.platform.process.phases import Phases
from megagrpo.sync.trainer_side.sync import Weights, WeightSync
from megagrpo.train_types import TrainState
from megagrpo.trainer.gpu.gpu_sharing import GpuTurns
from megagrpo.trainer.rollout.collector import Collector
from megagrpo.types import WeightSyncError


@dataclass
class Syncing:
    """Pushes the policy's `weights` to the engine. All methods are collective."""

    weight_sync: WeightSync | None  # None: the run has no servers
    weights: Callable[[], Weights]
    state: TrainState
    collector: Collector
    turns: GpuTurns
    phases: Phases
    say: Callable[[str], None]
    metrics: dict[str, float] = field(default_factory=dict)  # of the last sync

    def __post_init__(self) -> None:
        self.collector.refill = self.refill

    def sync(self) -> None:
        """Push the policy's weights to the engine. They are verified there before this returns. A run that was asked to
        stop pushes nothing: it generates no more responses, and a resumed run pushes these weights first."""
        if self.collector.stop_requested():
            return
        version = self.state.weight_version + 1
        try:
            self.metrics = self._push(version)
        except WeightSyncError as error:
            if not self.collector.stop_requested():
                raise
            self.say(f"weight sync skipped: servers were stopped with the run. {error}")
            return
        self.state.weight_version = version
        if self.collector.engine is not None:
            self.collector.engine.weight_version = version
        if self.collector.pool is not None:
            self.collector.pool.engine.leave_old_adapters()

    def refill(self) -> None:
        """Push the current weights again, to servers that were restarted and lost them."""
        self._push(self.state.weight_version)

    def _push(self, version: int) -> dict[str, float]:
        """Push the policy's weights as `version` and return the sync's metrics."""
        if self.weight_sync is None:
            return {}
        with self.turns.syncing() as handover, self.phases("sync") as task:
            return self.weight_sync.push(self.weights(), version, handover, task).metrics
