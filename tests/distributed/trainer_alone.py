"""A trainer without servers, and the prompts and rollouts that it is given."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from dumped_steps import rollouts, samples_of_replicas

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import RunConfig
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.profile import Profiler
from megagrpo.records.rows.recorder import Recorder, Recorders
from megagrpo.records.writer import MetricsWriter
from megagrpo.train_types import TrainState
from megagrpo.trainer.alarms import Alarms
from megagrpo.trainer.callbacks import Callbacks
from megagrpo.trainer.gpu.gpu_sharing import GpuTurns
from megagrpo.trainer.lifecycle import Evaluations, Lifecycle
from megagrpo.trainer.policy_update import Learning
from megagrpo.trainer.recording import Records, make_speed
from megagrpo.trainer.rollout.groups import Rollouts
from megagrpo.trainer.saving.saves import Saves
from megagrpo.trainer.saving.time_limit import TimeLimit
from megagrpo.trainer.trainer import Trainer


class Given:
    """Prompts and a collector that always return the same rollouts, without end."""

    stop = pool = engine = identity = None

    def __init__(self, layout: Layout):
        self.layout = layout

    def next(self, count: int) -> list:
        return []

    def learn(self, rates: dict) -> dict:
        return {}

    def store(self, state: TrainState) -> None:
        """Keep nothing: the rollouts are always the same."""

    restore = store

    def collect(self, *args) -> tuple[StepSamples, dict]:
        return samples_of_replicas(self.layout, rollouts()), {}

    def finished_ahead(self) -> list:
        return []

    def restore_ahead(self, *_) -> None:
        """No group was generated ahead."""


def trainer_alone(
    config: RunConfig,
    policy: MegatronPolicy,
    reference: Reference | None,
    run: Path,
    recorders: Sequence[Recorder],
    checkpointer: Checkpointer | None = None,
) -> Trainer:
    """A trainer without an engine, which records steps into the folder `run`."""
    layout, state, turns, writer = policy.layout, TrainState(), GpuTurns(), MetricsWriter.silent()
    given = Given(layout)
    phases, speed = Phases(), make_speed(policy, config.rollout, config.run.peak_tflops, config.lora.enabled)
    profiler = Profiler(config.run.profile, run, layout.world_rank, writer.message)
    policy.phases, phases.mark = phases, profiler.mark
    records = Records(writer, phases, Recorders((*recorders, speed)), profiler, speed)
    limits = config.rollout, config.train.max_skipped_steps
    alarms = Alarms(*limits, state, layout, "float32", False, "\n".join, writer.message)
    loss_fn = make_loss(config.algorithm)
    learning = Learning(config, policy, reference, loss_fn, state, records.recorders, phases, alarms.count_skip)
    syncing = SimpleNamespace(sync=lambda: setattr(state, "weight_version", state.weight_version + 1), metrics={})
    callbacks = Callbacks(config, layout)
    saves = Saves(checkpointer, state, given, given, turns, TimeLimit(None, given.stop), writer, background=False)
    evaluations = Evaluations([], config.evaluation, config.run, state, given, turns, records, callbacks, saves)
    lifecycle = Lifecycle(
        config.run, state, records, callbacks, alarms, saves, evaluations, lambda: None, config.run.num_steps
    )
    drawn = Rollouts(config, given, given, sampling_of(config.rollout), state, writer.message)
    return Trainer(config, state, turns, drawn, learning, syncing, records, lifecycle)
