"""Who has the GPU now, when the trainer and vLLM servers share one (`rollout.placement: colocated`).

| turn       | policy weights | gradients, masters, moments, reference | vLLM's weights |
|------------|----------------|----------------------------------------|----------------|
| starting   | no             | no                                     | dropped        |
| training   | yes            | yes                                    | dropped        |
| syncing    | yes            | no                                     | yes            |
| generating | no             | no                                     | yes            |
| checkpoint | yes            | yes                                    | host           |

vLLM's KV cache is on the GPU in the turn `generating` only. `GPU_TABLE` is this table as data, and only `GpuTurns` acts
on it. The side that leaves moves before the side that comes. Other rooms offer verbs: `Offload` moves the trainer's
state, the engine's `sleep` and `wake` move vLLM. In a sync the engine wakes its weights (`load_weights`), then its KV
cache (`resume`), each after a `Handover` call.

A trainer on its own GPU has the same turns and moves nothing. docs/gpu.md has the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from megagrpo.engine.http.protocol import EngineError
from megagrpo.engine.server_updates import Updates
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.platform.parallel.agree import RankError, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.sync.trainer_side.transport import Handover
from megagrpo.trainer.gpu.state_offload import NoOffload, Offload
from megagrpo.types import WeightSyncError


class GpuTurn(Enum):
    """A phase of a run, by what is in the GPU's memory."""

    STARTING = "starting"  # servers run, the policy is not built
    TRAINING = "training"  # log-probs and optimizer steps
    SYNCING = "syncing"  # a weight sync, until its weights are verified
    GENERATING = "generating"  # responses and evaluations
    CHECKPOINT = "checkpoint"  # a checkpoint between two steps, or after the last step


@dataclass(frozen=True)
class OnGpu:
    """GPU memory in one turn. `engine_weights` is "gpu", "host" (asleep, in host memory) or "dropped" (asleep)."""

    policy_weights: bool
    trainer_state: bool  # gradients, masters, moments, reference
    engine_weights: str


GPU_TABLE = {
    GpuTurn.STARTING: OnGpu(policy_weights=False, trainer_state=False, engine_weights="dropped"),
    GpuTurn.TRAINING: OnGpu(policy_weights=True, trainer_state=True, engine_weights="dropped"),
    GpuTurn.SYNCING: OnGpu(policy_weights=True, trainer_state=False, engine_weights="gpu"),
    GpuTurn.GENERATING: OnGpu(policy_weights=False, trainer_state=False, engine_weights="gpu"),
    GpuTurn.CHECKPOINT: OnGpu(policy_weights=True, trainer_state=True, engine_weights="host"),
}


@dataclass
class GpuTurns:
    """Hands the GPU from one turn to the next; each turn is a context manager. All methods are collective.

    Memory moves when a turn begins, in `syncing` also inside it, and never when a turn ends. `engine` is None on all
    ranks but rank 0.
    With `engine_sleeps` it leaves the GPU in turns of the trainer. `stop_if_requested` raises on every rank when the
    run is to stop; it is called before the engine leaves. An exception inside a turn leaves a state from which
    `checkpoint` works.
    """

    layout: Layout | None = None
    engine: Updates | None = None
    engine_sleeps: bool = False
    offload: Offload | NoOffload = field(default_factory=NoOffload)
    stop_if_requested: Callable[[], None] = lambda: None
    phases: Phases = field(default_factory=Phases)
    turn: GpuTurn = GpuTurn.STARTING

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Turn of the servers. After a sync they have it already; after a checkpoint they wake with kept weights."""
        if self.turn is GpuTurn.CHECKPOINT:
            move_trainer(self.offload, GpuTurn.GENERATING)
            self._drive_engine(lambda engine: engine.wake())
            self.turn = GpuTurn.GENERATING
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Turn of the trainer: servers sleep until the next sync."""
        self._take_gpu()
        yield

    @contextmanager
    def syncing(self) -> Iterator[Handover]:
        """Turn of a weight sync. Yields the handover for `WeightSync.push`; the servers have the GPU afterwards."""
        if self.turn is GpuTurn.GENERATING:  # `Syncing.refill`: a push without a training turn before it
            self._take_gpu()
        self.turn = GpuTurn.SYNCING
        yield sync_handover(self.offload)
        self.turn = GpuTurn.GENERATING

    @contextmanager
    def checkpoint(self, last: bool) -> Iterator[None]:
        """Turn of the trainer between two steps, or after the `last` one. Changes nothing while the trainer has the GPU
        already. A server that does not respond must not block a checkpoint."""
        if self.offload.away:
            with suppress(RankError, EngineError, WeightSyncError):
                self._drive_engine(lambda engine: engine.sleep(_keeps_weights(GpuTurn.CHECKPOINT), last))
            move_trainer(self.offload, GpuTurn.CHECKPOINT)
            self.turn = GpuTurn.CHECKPOINT
        yield

    def _take_gpu(self) -> None:
        """Let the trainer train: servers sleep once no rank generates any longer, then all trainer state is loaded."""
        if self.engine_sleeps:
            self.stop_if_requested()  # this also waits for all ranks
        self._drive_engine(lambda engine: engine.sleep(_keeps_weights(GpuTurn.TRAINING)))
        with self.phases("sync"):
            move_trainer(self.offload, GpuTurn.TRAINING)
        self.turn = GpuTurn.TRAINING

    def _drive_engine(self, action: Callable[[Updates], None]) -> None:
        """Run `action` on rank 0 with the engine, if servers sleep; it fails on every rank or on none."""
        if not self.engine_sleeps:
            return
        assert self.layout is not None, "servers that sleep need the ranks that they share GPUs with"
        run_own_and_agree(self.layout, lambda: None if self.engine is None else action(self.engine))


def sync_handover(offload: Offload | NoOffload) -> Handover:
    """Return the handover of a sync whose trainer state `offload` moves."""
    return Handover(partial(move_trainer, offload, GpuTurn.SYNCING), partial(move_trainer, offload, GpuTurn.GENERATING))


def move_trainer(offload: Offload | NoOffload, turn: GpuTurn) -> None:
    """Move the trainer's state to where `GPU_TABLE` has it in `turn`."""
    row = GPU_TABLE[turn]
    if row.trainer_state:
        offload.load_all()
    elif row.policy_weights:
        offload.load_weights_only()
    else:
        offload.offload_all()


def start_asleep(launcher: Launcher, keeps_weights: bool, sync_timeout: float, say: Callable[[str], None]) -> None:
    """Wait for the servers, then put them to sleep until the first sync: loading needs GPU memory. Rank 0 calls it.
    `keeps_weights`: that sync leaves some weights as loaded."""
    servers = Updates(
        launcher.wait(say), logs=launcher.logs, token=launcher.token, sleeps=True, sync_timeout=sync_timeout
    )
    servers.sleep(keeps_weights or _keeps_weights(GpuTurn.STARTING))


def _keeps_weights(turn: GpuTurn) -> bool:
    return GPU_TABLE[turn].engine_weights == "host"
