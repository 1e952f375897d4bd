"""The GRPO loop. `Trainer.step` is the algorithm; each part of it is in the package of that name."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from megagrpo.algorithms.advantages import advantages_of, less_kl, reward_statistics, rewards_by_group, to_samples
from megagrpo.algorithms.entropy import adapt_bonus, bonus_coefficient
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.packing import pack, packing_rules
from megagrpo.data.prompts import PromptSource
from megagrpo.data.slices import slices
from megagrpo.device import memory_gb
from megagrpo.engine.protocol import EngineError, derive_seed
from megagrpo.evaluation.sets import HeldOut, evaluate
from megagrpo.parallel.agree import RankError, own_part
from megagrpo.parallel.layout import Layout
from megagrpo.policy.finite import NonFiniteError
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference, kl_by_sample
from megagrpo.policy.step_terms import add_step_terms
from megagrpo.records.checkpoint import Checkpointer, CheckpointError
from megagrpo.records.dump import StepDumps
from megagrpo.records.metrics import MetricsWriter, PhaseTimer, idle_shares, over_updates, values_of
from megagrpo.rollout.collector import Collector, NoRollouts, StopRequested, rollout_metrics, staleness
from megagrpo.rollout.groups import draw_rollouts
from megagrpo.trainer.alarms import FIRST_STEPS, always_raising, mismatch_limit, mismatch_warning
from megagrpo.trainer.callbacks import CallbackError, Callbacks
from megagrpo.trainer.time_limit import OUT_OF_TIME, TimeLimit
from megagrpo.transfer.manifest import WeightSyncError
from megagrpo.types import LossFn, Metric, SamplingParams, ScoredRollout, TrainBatch, TrainSample, TrainState
from megagrpo.weight_sync.sync import NoOffload, Weights, WeightSync
from megagrpo.weight_sync.transport import TrainerOffload


@dataclass
class Trainer:
    """All components of a run, and its training loop. `weights` yields this rank's parameters, each with the part of the Hugging Face
    tensor it holds."""

    config: RunConfig
    layout: Layout
    policy: MegatronPolicy
    reference: Reference | None
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
    state: TrainState = field(default_factory=TrainState)
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    dtype: str = "bfloat16"  # the least precise compute dtype of trainer and engine
    engine_sleeps: bool = False  # servers release their GPU memory while the policy trains
    engine_naps: bool = False  # servers sleep because of a checkpoint between two steps
    offload: TrainerOffload = field(default_factory=NoOffload)  # moves trainer state off the GPU while servers use it
    saved: TrainState = field(default_factory=TrainState)  # state in the newest checkpoint; a run at step 0 needs no checkpoint
    saving: TrainState | None = None  # state in the checkpoint that is being written
    failed_saves: int = 0
    synced: dict[str, float] = field(default_factory=dict)  # metrics of the last weight sync
    run_folder_check: Callable[[], None] = lambda: None  # raises when the run's folder no longer exists
    callbacks: Callbacks | None = None  # the user's code between steps; None: the run has none
    resumed_from: Path | None = None  # checkpoint that the run continues from
    time_limit: TimeLimit = field(init=False)

    def __post_init__(self):
        self.collector.refill = self.refill
        self.time_limit = TimeLimit(None, self.collector.stop)
        self.callbacks = self.callbacks or Callbacks(self.config, self.layout)

    def step(self) -> dict[str, float]:
        """Run one training step and return its metrics, the same on every rank. Raises StopRequested before anything was trained."""
        config = self.config
        scored, metrics = draw_rollouts(self.collector, self.prompts, config, self.sampling, self.state.step, self.writer.message)
        metrics |= self.staleness(scored)
        self.let_engine_sleep()
        rewards = rewards_by_group(scored, config.rollout.num_generations)
        advantages = advantages_of(scored, config)
        batches = [self.with_logprobs(batch) for batch in self.batches(to_samples(scored, advantages))]
        if config.algorithm.kl_in_reward:
            advantages, batches, metrics["kl"] = self.with_kl_in_reward(scored, batches)
        self.dumps.begin(self.state.step + 1)
        metrics |= over_updates([self.train(batch) for batch in batches * config.algorithm.num_iterations])
        metrics |= over_updates([batch.packing for batch in batches])
        del batches  # also frees the reference's hidden states, which are not needed while servers generate
        self.dumps.finish(scored, advantages.flatten().tolist())
        self.move_reference()
        self.sync()
        self.writer.completions(self.state.step + 1, scored, advantages.flatten().tolist())
        return metrics | reward_statistics(rewards) | rollout_metrics(scored)

    def run(self) -> int:
        """Run steps until `run.max_steps` or a request to stop, with evaluations and checkpoints in between.

        Returns 0, or the number of the signal that asked to stop.
        """
        run = self.config.run
        self.sync()
        try:
            self.callbacks.train_begin(self.state.step, self.resumed_from)
            self.evaluate_if_due()  # before the first step, or an evaluation that a stop has prevented
            while self.state.step < run.max_steps and not self.callbacks.should_training_stop:
                self.let_engine_go_on()
                self.callbacks.step_begin()
                self.start_clocks()
                self.time_limit.step_begins()
                metrics = self.step()
                self.state.step, self.state.cursor = self.state.step + 1, self.prompts.cursor
                self.collector.step = self.state.step
                self.check_mismatch(metrics)
                own_part(self.layout, self.run_folder_check)
                self.finish_save(wait=False)
                metrics = self.with_speed(metrics)
                self.writer.step(self.state.step, metrics)
                self.callbacks.step_end(self.state.step, metrics)
                self.stop_if_rewards_raise(metrics)
                self.stop_if_broken()
                self.evaluate_if_due()
                last = self.state.step == run.max_steps or self.callbacks.should_training_stop
                if last or self.callbacks.should_save or (run.save_steps and self.state.step % run.save_steps == 0):
                    self.save(must_succeed=last)
            early = " (a callback stopped the run)" if self.state.step < run.max_steps else ""
            self.writer.message(f"finished {self.state.step} steps{early}")
            self.callbacks.train_end()
        except StopRequested as stop:
            why = "the time limit is near" if stop.number == OUT_OF_TIME else f"stop requested ({signal.Signals(stop.number).name})"
            self.writer.message(f"{why} after step {self.state.step}")
            self.save(must_succeed=True)
            self.callbacks.train_end()
            return stop.number
        except NoRollouts:
            self.save(must_succeed=False)
            self.finish_save(wait=True)
            raise
        except (RankError, EngineError, BrokenTraining, CallbackError):
            with suppress(RuntimeError):  # finish_save is collective: it fails when another rank has already exited
                self.finish_save(wait=True)
            raise
        finally:
            self.time_limit.close()
        return 0

    def batches(self, samples: Sequence[TrainSample]) -> list[TrainBatch]:
        """Pack this rank's share of the samples, one TrainBatch per optimizer step."""
        rules, seed = packing_rules(self.config, self.policy.shares_prompts), derive_seed(self.config.run.seed, self.state.step, "slices")
        parts = slices(samples, self.config.algorithm.steps_per_generation, seed)
        return [pack(part, rules, self.layout.dp_rank, self.layout.dp_size) for part in parts]

    def with_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add log-probs (float32 [T] per micro-batch): old ones when the policy changes before their use, reference ones for the KL term. A
        KL in the reward needs both."""
        algorithm = self.config.algorithm
        with self.timer("logprobs"):
            if algorithm.updates_per_step > 1 or algorithm.kl_in_reward:
                batch = batch.with_terms(old_logprobs=self.policy.logprobs(batch))
            return batch if self.reference is None else self.reference.annotate(batch)

    def with_kl_in_reward(self, scored: Sequence[ScoredRollout], batches: list[TrainBatch]) -> tuple[Tensor, list[TrainBatch], float]:
        """Subtract beta times each response's KL from its reward. Returns the new advantages [P, G] float64, the batches with these
        advantages, and the mean KL."""
        kl = kl_by_sample(batches, self.layout)
        advantages = advantages_of(less_kl(scored, kl, self.config.algorithm.beta), self.config)
        return advantages, [batch.with_advantages(advantages.flatten()) for batch in batches], kl.mean().item()

    def train(self, batch: TrainBatch) -> dict[str, Metric]:
        """Run one optimizer step on the batch and return its metrics. The step is skipped when its loss or gradient is not finite; metrics
        of the optimizer are missing then."""
        algorithm = self.config.algorithm
        divisor = denominator(batch, algorithm.loss.average, self.config.rollout.max_completion_length)
        entropy_coef = bonus_coefficient(self.state, algorithm)
        with self.timer("logprobs"):
            batch = add_step_terms(batch, self.policy, divisor, entropy_coef)
        loss_fn = self.dumps.record(self.loss_fn)
        with self.timer("train"):
            try:
                metrics = self.policy.train_step(batch, loss_fn, divisor)
                self.state.skipped_in_a_row = 0
            except NonFiniteError as error:
                metrics = error.metrics
                self.count_skip(error)
        if algorithm.entropy_bonus:
            metrics["entropy_coef"] = Metric(entropy_coef)
            adapt_bonus(self.state, values_of(metrics), algorithm)
        self.dumps.measured(values_of(metrics), divisor, batch.samples)
        return metrics

    def count_skip(self, error: NonFiniteError) -> None:
        """Count and report a skipped optimizer step, with the Hugging Face name of the tensor that was not finite."""
        self.state.skipped_steps += 1
        self.state.skipped_in_a_row += 1
        tensor, where = error.tensor, "in the loss, not in a gradient"
        if tensor is not None:
            found = next((blocks for name, _, blocks in self.weights() if name == tensor.name), [])
            names = sorted({block.name for block in self.layout.all_gather_objects(found)[tensor.rank]}) or [tensor.name]
            where = f"in the {tensor.kind} of {', '.join(names)} on rank {tensor.rank}"
        self.writer.message(
            f"warning: step {self.state.step + 1}: optimizer step skipped, weights unchanged: NaN or infinity {where}; "
            f"loss {error.metrics['loss'].value:g}; skipped in a row {self.state.skipped_in_a_row} of "
            f"{self.config.train.max_skipped_steps} allowed"
        )

    def stop_if_rewards_raise(self, metrics: dict[str, float]) -> None:
        """Save and raise BrokenTraining on every rank when a reward function raised for every response of a step."""
        failing = always_raising(metrics, self.config)
        if not failing:
            return
        tracebacks = self.collector.reward_tracebacks(failing)
        self.save(must_succeed=False)
        raise BrokenTraining(
            f"rewards.functions: {', '.join(failing)} raised for every response of step {self.state.step}; correct the function and "
            f"continue with --resume. Its first traceback:\n{tracebacks}"
        )

    def stop_if_broken(self) -> None:
        """Raise BrokenTraining on every rank when too many optimizer steps in a row were skipped."""
        if self.state.skipped_in_a_row >= self.config.train.max_skipped_steps:
            raise BrokenTraining(
                f"train.max_skipped_steps: {self.state.skipped_in_a_row} optimizer steps in a row had NaN or infinity; the warnings name "
                "the tensors. Resume from a checkpoint with a lower train.learning_rate, or look into a step with debug.dump_steps"
            )

    def check_mismatch(self, metrics: dict[str, float]) -> None:
        """Count and report a step whose train/rollout mismatch is above normal."""
        error, first = metrics.get("token_mult_prob_error"), self.state.first_mismatches
        if error is None:
            return
        limit = mismatch_limit(self.config, self.dtype, first)
        if limit is not None and error > limit:
            self.state.mismatch_alarms += 1
            self.writer.message(mismatch_warning(self.config.rollout, self.dtype, self.state.step, error, limit, first))
        if len(first) < FIRST_STEPS and math.isfinite(error):
            self.state.first_mismatches = [*first, error]

    def sync(self) -> None:
        """Push the policy's weights to the engine. They are verified there before this returns."""
        version = self.state.weight_version + 1
        with self.timer("sync"):
            try:
                self.synced = self.weight_sync.push(self.weights(), version).metrics
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
        self.let_engine_sleep()
        with self.timer("sync"):
            self.weight_sync.push(self.weights(), self.state.weight_version)

    def staleness(self, scored: Sequence[ScoredRollout]) -> dict[str, float]:
        """Return the age of the weights that sampled this step's rollouts; empty without asynchronous generation."""
        if not self.config.rollout.max_staleness:
            return {}
        ages = staleness(scored, self.state.weight_version)
        assert 0 <= ages["staleness/max"] <= self.config.rollout.max_staleness, ages
        return ages

    def let_engine_sleep(self) -> None:
        """Put servers that share the trainer's GPUs to sleep until the next sync, once no rank generates any longer. Then load the policy's
        offloaded state back to the GPU."""
        if self.engine_sleeps:
            self.collector.stop_if_requested()  # this also waits for all ranks
            own_part(self.layout, lambda: self.weight_sync.engine.sleep(), here=self.layout.world_rank == 0)
        with self.timer("sync"):
            self.offload.keep_everything()

    def let_engine_nap(self, last: bool) -> None:
        """Put servers to sleep for a checkpoint between two steps, or after the `last` step. They keep their weights in host memory. A
        server that does not respond must not block the checkpoint."""
        if not self.offload.away:
            return
        if self.engine_sleeps:
            with suppress(RankError, EngineError, WeightSyncError):
                own_part(self.layout, lambda: self.weight_sync.engine.sleep(True, last), here=self.layout.world_rank == 0)
        self.offload.keep_everything()
        self.engine_naps = True

    def let_engine_go_on(self) -> None:
        """Wake servers that sleep because of a checkpoint; they serve again with the weights they kept."""
        if not self.engine_naps:
            return
        self.offload.keep_nothing()
        if self.engine_sleeps:
            own_part(self.layout, lambda: self.weight_sync.engine.wake(), here=self.layout.world_rank == 0)
        self.engine_naps = False

    def move_reference(self) -> None:
        """Update the reference towards the policy at the end of every `ref_model_sync_steps` steps."""
        algorithm = self.config.algorithm
        if algorithm.sync_ref_model and (self.state.step + 1) % algorithm.ref_model_sync_steps == 0:
            self.reference.mix_in(algorithm.ref_model_mixup_alpha)

    def evaluate_if_due(self) -> None:
        """Evaluate before the first step, after the last and every `evaluation.steps`, once for each of these steps."""
        step, every = self.state.step, self.config.evaluation.steps
        due = step in (0, self.config.run.max_steps) or (every and step % every == 0)
        if due and self.state.evaluated != step:
            self.evaluate()

    def evaluate(self) -> None:
        """Score responses to the held-out prompts. With `evaluation.keep_best`, save a checkpoint when the result is the best so far."""
        if not self.held_out:
            return
        metrics = evaluate(self.held_out, self.collector.collect, self.config.run.seed)
        self.writer.evaluation(self.state.step, metrics)
        self.state.evaluated = self.state.step
        self.callbacks.evaluated(metrics)
        if self.config.evaluation.keep_best is not None:
            self.keep_if_best(metrics)

    def keep_if_best(self, metrics: dict[str, float]) -> None:
        """Save a checkpoint that is kept, when the metric `evaluation.keep_best` is higher than in all earlier evaluations of a trained
        model.

        Raises ConfigError before the first step when there is no metric of that name. A later evaluation without it is not the best.
        """
        self.finish_save(wait=True)  # the checkpoint in progress may hold the best weights
        name, state = self.config.evaluation.keep_best, self.state
        if state.step == 0 and name not in metrics:
            raise ConfigError(f"evaluation.keep_best: no metric `{name}`; evaluations have {', '.join(sorted(metrics))}")
        if state.step == 0 or name not in metrics or (state.best_value is not None and metrics[name] <= state.best_value):
            return
        state.best_step, state.best_value = state.step, metrics[name]
        self.save(must_succeed=False)

    def save(self, must_succeed: bool) -> None:
        """Write a checkpoint, unless this step has one. During a run a failure is reported and counted. The last checkpoint must succeed,
        and is waited for."""
        self.finish_save(wait=True)
        if self.state.step == self.saved.step:
            return
        self.let_engine_nap(last=must_succeed)
        background = self.config.run.async_save and not must_succeed
        self.saving = replace(self.state, pass_rates=self.prompts.curriculum.history, ahead=self.collector.finished_ahead())
        with self.counting_failures(must_succeed):
            self.checkpointer.start(self.saving, background)
        self.finish_save(wait=not background, must_succeed=must_succeed)

    def finish_save(self, wait: bool, must_succeed: bool = False) -> None:
        """Record that the checkpoint in progress is complete or has failed, if so. With `wait`, wait for it."""
        with self.counting_failures(must_succeed):
            path = self.checkpointer.finish(wait)
            if path is not None:
                self.saved, self.saving = self.saving, None
                # With async_save, a stop may have to wait for a checkpoint that has just begun, and then for the last one.
                self.time_limit.saved(self.checkpointer.seconds * (2 if self.config.run.async_save else 1))
                self.writer.message(f"checkpoint {path}")
                self.callbacks.saved(path)

    @contextmanager
    def counting_failures(self, must_succeed: bool) -> Iterator[None]:
        """Report and count a failed checkpoint, and forget that it was the best. Raises CheckpointError with `must_succeed`."""
        try:
            yield
        except CheckpointError as error:
            if must_succeed:
                raise
            self.failed_saves += 1
            self.state.best_step, self.state.best_value = self.saved.best_step, self.saved.best_value
            self.writer.message(f"warning: {error}")

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`."""
        self.state = self.checkpointer.load(path)
        self.saved, self.prompts.cursor = replace(self.state), self.state.cursor
        self.prompts.curriculum.history = self.state.pass_rates
        if self.collector.pool is not None:
            self.collector.pool.load_state_dict(self.state.ahead)
        self.state.ahead, self.resumed_from = [], path
        self.collector.step = self.state.step
        self.writer.message(f"resumed from {path} after step {self.state.step}")

    def start_clocks(self) -> None:
        """Reset the timers, so that the next step's times do not include what came before it."""
        self.timer.collect()
        if self.collector.pool is not None:
            self.collector.pool.measured()

    def with_speed(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the seconds of each phase, tokens per second (prompts and responses), peak memory of this process, and run counters to the
        metrics."""
        times, pool = self.timer.collect(), self.collector.pool
        speed = {"tokens_per_second": metrics["num_tokens"] / times["time/step"], "memory_gb": memory_gb()}
        speed |= idle_shares(times) | (pool.measured() if pool is not None else {})
        counters = {"weight_version": float(self.state.weight_version), "checkpoint/failures": float(self.failed_saves)}
        counters |= {"train/skipped_steps": float(self.state.skipped_steps), "mismatch/alarms": float(self.state.mismatch_alarms)}
        return metrics | times | self.synced | speed | counters


class BrokenTraining(RuntimeError):
    """More steps cannot learn anything: gradients are never finite, or a reward function always raises."""
