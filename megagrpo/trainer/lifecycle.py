"""What a run does around its steps, evaluations among it, and the ways in which it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from megagrpo.config import EvaluationSection, RunSection
from megagrpo.engine.http.protocol import EngineError
from megagrpo.platform.parallel.agree import RankError, on_first_rank
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import CHECKPOINTS
from megagrpo.records.writer import MetricsWriter
from megagrpo.train_types import TrainState
from megagrpo.trainer.alarms import Alarms, BrokenTraining
from megagrpo.trainer.callbacks import CallbackError, Callbacks
from megagrpo.trainer.evaluation.sets import HeldOut, decodable_sets, evaluate
from megagrpo.trainer.gpu.gpu_sharing import GpuTurns
from megagrpo.trainer.recording import Records
from megagrpo.trainer.rollout.collector import Collector, NoRollouts, StopRequested
from megagrpo.trainer.rollout.groups import Rollouts
from megagrpo.trainer.run_inputs import Inputs
from megagrpo.trainer.saving.saves import Saves
from megagrpo.trainer.saving.time_limit import OUT_OF_TIME, TimeLimit


@dataclass
class Evaluations:
    """Scores responses to the held-out prompts. All methods are collective."""

    held_out: Sequence[HeldOut]
    section: EvaluationSection
    run: RunSection
    state: TrainState
    collector: Collector
    turns: GpuTurns
    records: Records
    callbacks: Callbacks
    saves: Saves
    decodes: bool = False  # whether damaged images of the sets are known

    @property
    def has_sets(self) -> bool:
        """Whether there are held-out sets."""
        return bool(self.held_out)

    def evaluate_if_due(self) -> None:
        """Evaluate before the first step, after the last and every `evaluation.steps`, once for each of these steps."""
        step, every = self.state.step, self.section.steps
        due = step in (0, self.run.num_steps) or (every and step % every == 0)
        if due and self.has_sets and self.state.evaluated != step:
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluate every set. With `evaluation.keep_best`, save a checkpoint when the result is the best so far."""
        self.records.phases.about = "evaluation: "
        metrics = self.measure()
        self.records.writer.evaluation(self.state.step, metrics)
        self.state.evaluated = self.state.step
        self.callbacks.evaluated(metrics)
        if self.section.keep_best is not None:
            self.saves.save_if_best(self.section.keep_best, metrics)

    def measure(self) -> dict[str, float]:
        """Return the metrics of every set: of the policy's responses, which rewards score."""
        if not self.decodes:
            self.decodes = True
            self.held_out = decodable_sets(self.held_out, self.collector.layout, self.records.writer.message)
        with self.turns.generating():
            return evaluate(self.held_out, self.collector.collect, self.run.seed)


@dataclass
class Lifecycle:
    """Callbacks, alarms, evaluations, checkpoints and the time limit of a run, in their order around each step. All
    methods are collective. `check_folder` raises when the run's folder no longer exists."""

    run: RunSection
    state: TrainState
    records: Records
    callbacks: Callbacks
    alarms: Alarms
    saves: Saves
    evaluations: Evaluations
    check_folder: Callable[[], None]
    last_step: int  # `run.num_steps`, or the last step with kept rollouts
    stopped_by: int = 0  # the signal that ended the run; 0: none

    def begin(self) -> None:
        """Begin the run, before its first step. An evaluation that a stop has prevented is done now."""
        self.callbacks.train_begin(self.state.step, self.saves.resumed_from)
        self.evaluations.evaluate_if_due()

    def begin_step(self) -> bool:
        """Begin the next step. Returns False when the run is over."""
        if self.state.step >= self.last_step or self.callbacks.control.should_training_stop:
            return False
        self.callbacks.step_begin()
        self.saves.time_limit.step_begins()
        return True

    def end_step(self, metrics: dict[str, float], synced: dict[str, float]) -> None:
        """End a step with its metrics and those of its weight sync: check and write them, evaluate, and save."""
        step = self.state.step
        self.alarms.check_mismatch(metrics)
        self.alarms.check_tasks(metrics)
        self.check_folder()
        self.saves.finish(wait=False)
        metrics = self.records.with_speed(metrics, synced) | {
            "weight_version": float(self.state.weight_version),
            "checkpoint/failures": float(self.saves.failures),
            "train/skipped_steps": float(self.state.skipped_steps),
            "mismatch/alarms": float(self.state.mismatch_alarms),
        }
        self.records.writer.step(step, metrics)
        self.callbacks.step_end(step, metrics)
        self.alarms.stop_if_rewards_raise(metrics, self.saves)
        self.alarms.stop_if_skipping()
        self.evaluations.evaluate_if_due()
        last = step == self.last_step or self.callbacks.control.should_training_stop
        if last or self.callbacks.control.should_save or (self.run.save_steps and step % self.run.save_steps == 0):
            self.saves.save(must_succeed=last)

    def finish(self) -> None:
        """End a run whose steps are done."""
        early = " (a callback stopped the run)" if self.state.step < self.last_step else ""
        self.records.writer.message(f"finished {self.state.step} steps{early}")
        self.callbacks.train_end()

    @contextmanager
    def endings(self) -> Iterator[None]:
        """Save what there is when the run inside ends early. Only a request to stop is no error."""
        try:
            yield
        except StopRequested as stop:
            self._stop(stop.number)
        except NoRollouts:
            self.saves.save(must_succeed=False)
            self.saves.finish(wait=True)
            raise
        except (RankError, EngineError, BrokenTraining, CallbackError):
            with suppress(RuntimeError):  # `finish` is collective: it fails when another rank has already exited
                self.saves.finish(wait=True)
            raise
        finally:
            self.saves.time_limit.close()

    def _stop(self, number: int) -> None:
        out_of_time = number == OUT_OF_TIME
        why = "the time limit is near" if out_of_time else f"stop requested ({signal.Signals(number).name})"
        self.records.writer.message(f"{why} after step {self.state.step}")
        self.saves.save(must_succeed=True)
        self.callbacks.train_end()
        self.stopped_by = number


def make_lifecycle(
    inputs: Inputs, layout: Layout, evaluations: Evaluations, alarms: Alarms, last_step: int | None = None
) -> Lifecycle:
    """Return the lifecycle of a run with these evaluations. `last_step` is None if the run has all its steps."""
    own, lock = evaluations, inputs.folder.lock
    parts = own.run, own.state, own.records, own.callbacks, alarms, own.saves, own
    return Lifecycle(*parts, partial(on_first_rank, layout, lock.check), last_step or own.run.num_steps)


def make_evaluations(
    inputs: Inputs, rollouts: Rollouts, turns: GpuTurns, records: Records, saves: Saves
) -> Evaluations:
    """Return the evaluations of a run that samples responses."""
    config, state, collector = inputs.config, rollouts.state, rollouts.collector
    sets = inputs.data.held_out, config.evaluation, config.run
    return Evaluations(*sets, state, collector, turns, records, inputs.callbacks, saves)


def make_saves(
    inputs: Inputs,
    policy: MegatronPolicy,
    reference: Reference | None,
    critic: MegatronPolicy | None,
    state: TrainState,
    collector: Collector,
    turns: GpuTurns,
    writer: MetricsWriter,
) -> Saves:
    """Return what saves the run's models and state."""
    config, folder = inputs.config, inputs.folder.path / CHECKPOINTS
    kept = config.run.save_total_limit, inputs.model.folder
    checkpointer = Checkpointer(folder, policy.layout, policy, *kept, reference, critic)
    limit, background = TimeLimit(None, collector.stop), config.run.async_save
    return Saves(
        checkpointer, state, inputs.data.prompts, collector, turns, limit, writer, background, inputs.callbacks.saved
    )
