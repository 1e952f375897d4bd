"""The GRPO loop. `Trainer.step` is the algorithm; each part of it is in the package of that name."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from megagrpo.algorithms.advantages import (
    advantages_of,
    charged_kl,
    less_kl,
    reward_statistics,
    rewards_by_group,
    to_samples,
)
from megagrpo.algorithms.entropy import adapt_bonus, bonus_coefficient
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import RunConfig
from megagrpo.data.packing import pack, packing_rules
from megagrpo.data.prompts import PromptSource
from megagrpo.data.sample_slices import slices
from megagrpo.engine.protocol import EngineError, derive_seed
from megagrpo.platform.parallel.agree import RankError, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.policy.finite import NonFiniteError
from megagrpo.policy.frozen_model import FrozenModel
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference, kl_by_sample
from megagrpo.policy.step_terms import add_step_terms
from megagrpo.records.checkpoint import Checkpointer
from megagrpo.records.dump import StepDumps
from megagrpo.records.metrics import idle_shares, over_updates, values_of
from megagrpo.records.token_log import TokenLog
from megagrpo.records.writer import MetricsWriter
from megagrpo.sync.trainer_side.sync import Weights, WeightSync
from megagrpo.sync.wire.manifest import WeightSyncError
from megagrpo.trainer.alarms import Alarms, BrokenTraining
from megagrpo.trainer.callbacks import CallbackError, Callbacks
from megagrpo.trainer.evaluation.sets import HeldOut, evaluate
from megagrpo.trainer.gpu_turns import GpuTurns
from megagrpo.trainer.rollout.collector import Collector, NoRollouts, StopRequested, rollout_metrics, staleness
from megagrpo.trainer.rollout.groups import draw_rollouts
from megagrpo.trainer.saves import Saves
from megagrpo.trainer.speed import Speed
from megagrpo.trainer.time_limit import OUT_OF_TIME, TimeLimit
from megagrpo.types import LossFn, Metric, SamplingParams, ScoredRollout, TrainBatch, TrainSample, TrainState


@dataclass
class Update:
    """One optimizer step: its inputs, and the metrics that it gave."""

    batch: TrainBatch
    loss_fn: LossFn
    denominator: int
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass
class Trainer:
    """All components of a run, and its training loop. `weights` yields this rank's parameters, each with the part of
    the Hugging Face tensor it holds."""

    config: RunConfig
    layout: Layout
    policy: MegatronPolicy
    reference: FrozenModel | None
    loss_fn: LossFn
    prompts: PromptSource
    held_out: list[HeldOut]
    collector: Collector
    sampling: SamplingParams
    weights: Callable[[], Weights]
    weight_sync: WeightSync
    checkpointer: Checkpointer
    writer: MetricsWriter
    dumps: StepDumps
    callbacks: Callbacks
    state: TrainState = field(default_factory=TrainState)
    tokens: TokenLog = field(default_factory=TokenLog)
    phases: Phases = field(default_factory=Phases)
    turns: GpuTurns = field(default_factory=GpuTurns)
    dtype: str = "bfloat16"  # the least precise compute dtype of trainer and engine
    synced: dict[str, float] = field(default_factory=dict)  # metrics of the last weight sync
    run_folder_check: Callable[[], None] = lambda: None  # raises when the run's folder no longer exists
    # records a step that `run.profile` names
    profile: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext()
    time_limit: TimeLimit = field(init=False)
    saves: Saves = field(init=False)
    alarms: Alarms = field(init=False)
    speed: Speed = field(init=False)

    def __post_init__(self) -> None:
        self.collector.refill = self.refill
        self.time_limit = TimeLimit(None, self.collector.stop)
        parts = self.checkpointer, self.state, self.prompts, self.collector, self.turns, self.time_limit, self.writer
        self.saves = Saves(*parts, background=self.config.run.async_save, report=self.callbacks.saved)
        self.alarms = Alarms(self.config, self.state, self.dtype, self.writer.message)
        self.speed = Speed(self.config, self.layout, self.policy)

    def step(self) -> dict[str, float]:
        """Run one training step and return its metrics, the same on every rank. Raises StopRequested before anything
        was trained."""
        with self.turns.generating():
            self.start_clocks()
            scored, metrics = self.draw_rollouts()
        with self.turns.training():
            advantages = advantages_of(scored, self.config)
            batches = [self.with_logprobs(batch) for batch in self.batches(to_samples(scored, advantages))]
            if self.config.algorithm.kl_in_reward:
                advantages, batches, metrics["kl"] = self.with_kl_in_reward(scored, batches)
            self.dumps.begin(self.state.step + 1)
            self.tokens.begin(advantages.flatten().tolist())
            updates = []
            for batch in batches * self.config.algorithm.num_iterations:
                with self.update(batch) as update:
                    update.metrics = (
                        self.policy.backward(update.batch, update.loss_fn, update.denominator) | self.policy.update()
                    )
                updates.append(update.metrics)
            metrics |= over_updates(updates) | over_updates([batch.packing for batch in batches])
            # also frees the reference's hidden states, which are not needed while servers generate
            del batches, batch, update
            self.dumps.finish(scored, advantages.flatten().tolist())
            self.move_reference()
        self.sync()
        self.writer.completions(self.state.step + 1, scored, advantages.flatten().tolist())
        self.tokens.finish(self.state.step + 1, scored)
        rewards = rewards_by_group(scored, self.config.rollout.num_generations)
        return metrics | reward_statistics(rewards) | rollout_metrics(scored)

    def run(self) -> int:
        """Run `run.num_steps` steps, or until a request to stop, with evaluations and checkpoints in between.

        Returns 0, or the number of the signal that asked to stop.
        """
        run = self.config.run
        self.sync()
        try:
            self.callbacks.train_begin(self.state.step, self.saves.resumed_from)
            self.evaluate_if_due()  # before the first step, or an evaluation that a stop has prevented
            while self.state.step < run.num_steps and not self.callbacks.should_training_stop:
                self.callbacks.step_begin()
                self.time_limit.step_begins()
                with self.profile(self.state.step + 1):
                    metrics = self.step()
                self.state.step, self.state.cursor = self.state.step + 1, self.prompts.cursor
                self.collector.step = self.state.step
                self.alarms.check_mismatch(metrics)
                run_own_and_agree(self.layout, self.run_folder_check)
                self.saves.finish(wait=False)
                metrics = self.with_speed(metrics)
                self.writer.step(self.state.step, metrics)
                self.callbacks.step_end(self.state.step, metrics)
                self.alarms.stop_if_rewards_raise(metrics, self.collector, self.saves)
                self.alarms.stop_if_skipping()
                self.evaluate_if_due()
                last = self.state.step == run.num_steps or self.callbacks.should_training_stop
                if last or self.callbacks.should_save or (run.save_steps and self.state.step % run.save_steps == 0):
                    self.saves.save(must_succeed=last)
            early = " (a callback stopped the run)" if self.state.step < run.num_steps else ""
            self.writer.message(f"finished {self.state.step} steps{early}")
            self.callbacks.train_end()
        except StopRequested as stop:
            why = (
                "the time limit is near"
                if stop.number == OUT_OF_TIME
                else f"stop requested ({signal.Signals(stop.number).name})"
            )
            self.writer.message(f"{why} after step {self.state.step}")
            self.saves.save(must_succeed=True)
            self.callbacks.train_end()
            return stop.number
        except NoRollouts:
            self.saves.save(must_succeed=False)
            self.saves.finish(wait=True)
            raise
        except (RankError, EngineError, BrokenTraining, CallbackError):
            with suppress(RuntimeError):  # `finish` is collective: it fails when another rank has already exited
                self.saves.finish(wait=True)
            raise
        finally:
            self.time_limit.close()
        return 0

    def draw_rollouts(self) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Return this step's scored rollouts, in whole groups, with counters and the age of the weights that sampled
        them."""
        scored, metrics = draw_rollouts(
            self.collector, self.prompts, self.config, self.sampling, self.state.step, self.writer.message
        )
        if self.config.rollout.max_staleness:
            ages = staleness(scored, self.state.weight_version)
            assert 0 <= ages["staleness/max"] <= self.config.rollout.max_staleness, ages
            metrics |= ages
        return scored, metrics

    def batches(self, samples: Sequence[TrainSample]) -> list[TrainBatch]:
        """Pack this rank's share of the samples, one TrainBatch per optimizer step."""
        rules, seed = (
            packing_rules(self.config, self.policy.shares_prompts),
            derive_seed(self.config.run.seed, self.state.step, "slices"),
        )
        parts = slices(samples, self.config.algorithm.steps_per_generation, seed)
        return [pack(part, rules, self.layout.dp_rank, self.layout.dp_size) for part in parts]

    def with_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add log-probs (float32 [T] per micro-batch): old ones when the policy changes before their use, reference
        ones for the KL term. A KL in the reward needs both."""
        algorithm = self.config.algorithm
        with self.phases("logprobs"):
            if algorithm.updates_per_step > 1 or algorithm.kl_in_reward:
                batch = batch.with_terms(old_logprobs=self.policy.logprobs(batch))
            return batch if self.reference is None else self.reference.annotate(batch)

    def with_kl_in_reward(
        self, scored: Sequence[ScoredRollout], batches: list[TrainBatch]
    ) -> tuple[Tensor, list[TrainBatch], float]:
        """Subtract beta times each response's KL from its reward. Returns the new advantages [P, G] float64, the
        batches with these advantages, and the mean KL."""
        algorithm, num_generations = self.config.algorithm, self.config.rollout.num_generations
        kl = kl_by_sample(batches, self.layout)
        kl = charged_kl(scored, kl, num_generations, algorithm.mask_truncated_completions)
        advantages = advantages_of(less_kl(scored, kl, self.config.algorithm.beta), self.config)
        return advantages, [batch.with_advantages(advantages.flatten()) for batch in batches], kl.mean().item()

    @contextmanager
    def update(self, batch: TrainBatch) -> Iterator[Update]:
        """Prepare one optimizer step on the batch, and record its metrics. A step is skipped when its loss or gradient
        is not finite; metrics of the optimizer are missing then."""
        algorithm = self.config.algorithm
        divisor = denominator(batch, algorithm.loss.average, self.config.rollout.max_completion_length)
        entropy_coef = bonus_coefficient(self.state, algorithm)
        with self.phases("logprobs"):
            batch = add_step_terms(batch, self.policy, divisor, entropy_coef)
        update = Update(batch, self.dumps.record(self.tokens.record(self.loss_fn)), divisor)
        self.speed.count(batch.computed)
        with self.phases("train"):
            try:
                yield update
                self.state.skipped_in_a_row = 0
            except NonFiniteError as error:
                update.metrics = error.metrics
                self.alarms.count_skip(error, self.weights(), self.layout)
        if algorithm.entropy_bonus:
            update.metrics["entropy_coef"] = Metric(entropy_coef)
            adapt_bonus(self.state, values_of(update.metrics), algorithm)
        self.dumps.measured(values_of(update.metrics), divisor, batch.samples)
        self.tokens.measured()

    def move_reference(self) -> None:
        """Update the reference towards the policy at the end of every `ref_model_sync_steps` steps."""
        algorithm = self.config.algorithm
        if algorithm.sync_ref_model and (self.state.step + 1) % algorithm.ref_model_sync_steps == 0:
            assert self.reference is not None, "algorithm.sync_ref_model needs a reference"
            # of all frozen models only the policy's own copy can move towards it
            cast(Reference, self.reference).mix_in(algorithm.ref_model_mixup_alpha)

    def sync(self) -> None:
        """Push the policy's weights to the engine. They are verified there before this returns. A run that was asked to
        stop pushes
        nothing: it generates no more responses, and a resumed run pushes these weights first."""
        if self.collector.stop_requested():
            return
        version = self.state.weight_version + 1
        try:
            self.synced = self.push(version)
        except WeightSyncError as error:
            if not self.collector.stop_requested():
                raise
            self.writer.message(f"weight sync skipped: servers were stopped with the run. {error}")
            return
        self.state.weight_version = version
        if self.collector.engine is not None:
            self.collector.engine.weight_version = version

    def refill(self) -> None:
        """Push the current weights again, to servers that were restarted and lost them."""
        self.push(self.state.weight_version)

    def push(self, version: int) -> dict[str, float]:
        """Push the policy's weights as `version` and return the sync's metrics."""
        with self.turns.syncing() as handover, self.phases("sync") as task:
            return self.weight_sync.push(self.weights(), version, handover, task).metrics

    def evaluate_if_due(self) -> None:
        """Evaluate before the first step, after the last and every `evaluation.steps`, once for each of these steps."""
        step, every = self.state.step, self.config.evaluation.steps
        due = step in (0, self.config.run.num_steps) or (every and step % every == 0)
        if due and self.state.evaluated != step:
            self.evaluate()

    def evaluate(self) -> None:
        """Score responses to the held-out prompts. With `evaluation.keep_best`, save a checkpoint when the result is
        the best so far."""
        if not self.held_out:
            return
        self.phases.about = "evaluation: "
        with self.turns.generating():
            metrics = evaluate(self.held_out, self.collector.collect, self.config.run.seed)
        self.writer.evaluation(self.state.step, metrics)
        self.state.evaluated = self.state.step
        self.callbacks.evaluated(metrics)
        if self.config.evaluation.keep_best is not None:
            self.saves.save_if_best(self.config.evaluation.keep_best, metrics)

    def start_clocks(self) -> None:
        """Reset the timers, so that the next step's times do not include what came before it, and name the step in its
        progress."""
        self.phases.collect()
        self.phases.about = f"step {self.state.step + 1}/{self.config.run.num_steps} "
        if self.collector.pool is not None:
            self.collector.pool.measured()

    def with_speed(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the seconds of each phase, rates of tokens and FLOPs, memory, and run counters to the metrics.
        Collective."""
        times, pool = self.phases.collect(), self.collector.pool
        speed = self.speed.metrics(metrics["num_tokens"], metrics["num_generated_tokens"], times)
        speed |= idle_shares(times) | (pool.measured() if pool is not None else {})
        counters = {
            "weight_version": float(self.state.weight_version),
            "checkpoint/failures": float(self.saves.failures),
        }
        counters |= {
            "train/skipped_steps": float(self.state.skipped_steps),
            "mismatch/alarms": float(self.state.mismatch_alarms),
        }
        return metrics | times | self.synced | speed | counters
