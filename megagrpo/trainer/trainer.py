"""The GRPO loop. `Trainer.step` is the algorithm; everything it names lives in the room of that name."""

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
from megagrpo.policy.step_terms import look_ahead
from megagrpo.records.checkpoint import Checkpointer, CheckpointError
from megagrpo.records.dump import StepDumps
from megagrpo.records.metrics import MetricsWriter, PhaseTimer, idle_shares, over_updates
from megagrpo.rollout.collector import Collector, NoRollouts, StopRequested, rollout_metrics, staleness
from megagrpo.rollout.groups import draw_rollouts
from megagrpo.trainer.alarms import FIRST_STEPS, always_raising, mismatch_limit, mismatch_warning
from megagrpo.trainer.time_limit import OUT_OF_TIME, TimeLimit
from megagrpo.transfer.manifest import WeightSyncError
from megagrpo.types import LossFn, SamplingParams, ScoredRollout, TrainBatch, TrainSample, TrainState
from megagrpo.weight_sync.sync import Stays, Weights, WeightSync


@dataclass
class Trainer:
    """Everything a run is made of. `weights` yields this rank's parameters and which part of which Hugging Face tensor each holds."""

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
    dtype: str = "bfloat16"  # the least precise that trainer or engine computes in
    engine_sleeps: bool = False  # while the policy trains
    engine_naps: bool = False  # since a checkpoint
    offload: Stays = field(default_factory=Stays)  # what the policy leaves on its device for servers that do not sleep
    saved: TrainState = field(default_factory=TrainState)  # in the newest checkpoint; a run that has not begun needs none
    saving: TrainState | None = None  # in the one on its way to the disk
    failed_saves: int = 0
    synced: dict[str, float] = field(default_factory=dict)  # what the last weight sync took
    run_folder_check: Callable[[], None] = lambda: None  # raises when the run's folder is no longer there
    time_limit: TimeLimit = field(init=False)

    def __post_init__(self):
        self.collector.refill = self.refill
        self.time_limit = TimeLimit(None, self.collector.stop)

    def step(self) -> dict[str, float]:
        """One outer iteration; its metrics, the same on every rank. Raises StopRequested before anything was trained."""
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
        del batches  # and hidden states of the reference, which nobody needs while servers generate
        self.dumps.finish(scored, advantages.flatten().tolist())
        self.move_reference()
        self.sync()
        self.writer.completions(self.state.step + 1, scored, advantages.flatten().tolist())
        return metrics | reward_statistics(rewards) | rollout_metrics(scored)

    def run(self) -> int:
        """Steps until `run.max_steps` or a request to stop, with evaluation and checkpoints between them.

        0, or the number of the signal that asked to stop.
        """
        run = self.config.run
        self.sync()
        try:
            self.evaluate_if_due()  # before the first step, and what a stop has kept the run from
            while self.state.step < run.max_steps:
                self.let_engine_go_on()
                self.start_clocks()
                self.time_limit.step_begins()
                metrics = self.step()
                self.state.step, self.state.cursor = self.state.step + 1, self.prompts.cursor
                self.collector.step = self.state.step
                self.check_mismatch(metrics)
                own_part(self.layout, self.run_folder_check)
                self.finish_save(wait=False)
                self.writer.step(self.state.step, self.with_speed(metrics))
                self.stop_if_rewards_raise(metrics)
                self.stop_if_broken()
                last = self.state.step == run.max_steps
                self.evaluate_if_due()
                if last or (run.save_steps and self.state.step % run.save_steps == 0):
                    self.save(must_succeed=last)
            self.writer.message(f"finished {run.max_steps} steps")
        except StopRequested as stop:
            why = "the time limit is near" if stop.number == OUT_OF_TIME else f"stop requested ({signal.Signals(stop.number).name})"
            self.writer.message(f"{why} after step {self.state.step}")
            self.save(must_succeed=True)
            return stop.number
        except NoRollouts:
            self.save(must_succeed=False)
            self.finish_save(wait=True)
            raise
        except (RankError, EngineError, BrokenTraining):
            with suppress(RuntimeError):  # of a rank that has left already: the others wait for none that still runs
                self.finish_save(wait=True)
            raise
        finally:
            self.time_limit.close()
        return 0

    def batches(self, samples: Sequence[TrainSample]) -> list[TrainBatch]:
        """This rank's share of every optimizer step of an iteration."""
        rules, seed = packing_rules(self.config, self.policy.shares_prompts), derive_seed(self.config.run.seed, self.state.step, "slices")
        parts = slices(samples, self.config.algorithm.steps_per_generation, seed)
        return [pack(part, rules, self.layout.dp_rank, self.layout.dp_size) for part in parts]

    def with_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Old log-probs when the policy will have moved on from them, reference log-probs for the KL; both for a KL in the reward."""
        algorithm = self.config.algorithm
        with self.timer("logprobs"):
            if algorithm.updates_per_step > 1 or algorithm.kl_in_reward:
                batch = batch.with_logprobs(old=self.policy.logprobs(batch))
            return batch if self.reference is None else self.reference.annotate(batch)

    def with_kl_in_reward(self, scored: Sequence[ScoredRollout], batches: list[TrainBatch]) -> tuple[Tensor, list[TrainBatch], float]:
        """Advantages [P, G] of the rewards less beta times the KL of each response, batches that carry them, and the mean KL."""
        kl = kl_by_sample(batches, self.layout)
        advantages = advantages_of(less_kl(scored, kl, self.config.algorithm.beta), self.config)
        return advantages, [batch.with_advantages(advantages.flatten()) for batch in batches], kl.mean().item()

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step on the batch; none, and the metrics without those of the optimizer, when a number in it is not finite."""
        algorithm = self.config.algorithm
        divisor = denominator(batch, algorithm.loss_type, self.config.rollout.max_completion_length)
        entropy_coef = bonus_coefficient(self.state, algorithm)
        with self.timer("logprobs"):
            batch = look_ahead(batch, self.policy, divisor, entropy_coef)
        loss_fn = self.dumps.record(self.loss_fn)
        with self.timer("train"):
            try:
                metrics = self.policy.train_step(batch, loss_fn, divisor)
                self.state.skipped_in_a_row = 0
            except NonFiniteError as error:
                metrics = error.metrics
                self.count_skip(error)
        if algorithm.entropy_bonus:
            metrics["entropy_coef"] = entropy_coef
            adapt_bonus(self.state, metrics, algorithm)
        self.dumps.measured(metrics, divisor, batch.samples)
        return metrics

    def count_skip(self, error: NonFiniteError) -> None:
        """Count and report an optimizer step that was left out, with the tensor's name as Hugging Face has it."""
        self.state.skipped_steps += 1
        self.state.skipped_in_a_row += 1
        tensor, where = error.tensor, "of no gradient, but of the loss"
        if tensor is not None:
            found = next((blocks for name, _, blocks in self.weights() if name == tensor.name), [])
            names = sorted({block.name for block in self.layout.all_gather_objects(found)[tensor.rank]}) or [tensor.name]
            where = f"in the {tensor.kind} of {', '.join(names)} on rank {tensor.rank}"
        self.writer.message(
            f"warning: step {self.state.step + 1}: optimizer step skipped, no weight has changed: NaN or infinity {where}; "
            f"loss {error.metrics['loss']:g}; skipped in a row {self.state.skipped_in_a_row} of "
            f"{self.config.train.max_skipped_steps} allowed"
        )

    def stop_if_rewards_raise(self, metrics: dict[str, float]) -> None:
        """Save and raise BrokenTraining on every rank when a reward function has raised for every response of a step."""
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
                f"train.max_skipped_steps: {self.state.skipped_in_a_row} optimizer steps in a row met NaN or infinity; the warnings name "
                "the tensors. Resume from a checkpoint with a lower train.learning_rate, or look into a step with debug.dump_steps"
            )

    def check_mismatch(self, metrics: dict[str, float]) -> None:
        """Count and report a step whose engine and trainer disagree more than is normal."""
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
        """Give the engine the policy's weights; they are verified there before this returns."""
        version = self.state.weight_version + 1
        with self.timer("sync"):
            try:
                self.synced = self.weight_sync.push(self.weights(), version).metrics
            except WeightSyncError as error:
                if not self.collector.stop_requested():
                    raise
                self.writer.message(f"no weights were sent: servers were ended with the run. {error}")
                return
        self.state.weight_version = version
        if self.collector.engine is not None:
            self.collector.engine.weight_version = version

    def refill(self) -> None:
        """Give servers that lost the current weights, and were started again, the same ones."""
        self.let_engine_sleep()
        with self.timer("sync"):
            self.weight_sync.push(self.weights(), self.state.weight_version)

    def staleness(self, scored: Sequence[ScoredRollout]) -> dict[str, float]:
        """How old the weights are that sampled what this step trains on; nothing where generation does not run ahead."""
        if not self.config.rollout.max_staleness:
            return {}
        ages = staleness(scored, self.state.weight_version)
        assert 0 <= ages["staleness/max"] <= self.config.rollout.max_staleness, ages
        return ages

    def let_engine_sleep(self) -> None:
        """Have servers that share the trainer's GPUs give their memory back until the next sync, once no rank generates any more. What of
        the policy had made room for them is there again then."""
        if self.engine_sleeps:
            self.collector.stop_if_requested()  # this waits for all ranks, too
            own_part(self.layout, lambda: self.weight_sync.engine.sleep(), here=self.layout.world_rank == 0)
        with self.timer("sync"):
            self.offload.keep_everything()

    def let_engine_nap(self, last: bool) -> None:
        """The same for a checkpoint between two steps, or the `last` one: servers keep their weights, in the host's memory. One that cannot
        be told is no reason to save nothing."""
        if not self.offload.away:
            return
        if self.engine_sleeps:
            with suppress(RankError, EngineError, WeightSyncError):
                own_part(self.layout, lambda: self.weight_sync.engine.sleep(True, last), here=self.layout.world_rank == 0)
        self.offload.keep_everything()
        self.engine_naps = True

    def let_engine_go_on(self) -> None:
        """Have servers that nap serve again, with the weights that they have kept."""
        if not self.engine_naps:
            return
        self.offload.keep_nothing()
        if self.engine_sleeps:
            own_part(self.layout, lambda: self.weight_sync.engine.wake(), here=self.layout.world_rank == 0)
        self.engine_naps = False

    def move_reference(self) -> None:
        """Let the reference follow the policy at the end of every so many steps."""
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
        """Score responses to the held-out prompts; a checkpoint when they are the best so far and that is asked for."""
        if not self.held_out:
            return
        metrics = evaluate(self.held_out, self.collector.collect, self.config.run.seed)
        self.writer.evaluation(self.state.step, metrics)
        self.state.evaluated = self.state.step
        if self.config.evaluation.keep_best is not None:
            self.keep_if_best(metrics)

    def keep_if_best(self, metrics: dict[str, float]) -> None:
        """A checkpoint that stays, when `evaluation.keep_best` is higher than in every evaluation of a trained model before.

        ConfigError when there is no metric of that name. An evaluation that lacks it later on, with nothing to score, is not the best.
        """
        self.finish_save(wait=True)  # it may hold the best one
        name, state = self.config.evaluation.keep_best, self.state
        if state.step == 0 and name not in metrics:
            raise ConfigError(f"evaluation.keep_best: no metric `{name}`; evaluations have {', '.join(sorted(metrics))}")
        if state.step == 0 or name not in metrics or (state.best_value is not None and metrics[name] <= state.best_value):
            return
        state.best_step, state.best_value = state.step, metrics[name]
        self.save(must_succeed=False)

    def save(self, must_succeed: bool) -> None:
        """Write a checkpoint, unless this step has one. A failure in the middle of a run is reported and counted; the last must succeed,
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
        """Take note that the checkpoint on its way is complete, or has failed, if it is."""
        with self.counting_failures(must_succeed):
            path = self.checkpointer.finish(wait)
            if path is not None:
                self.saved, self.saving = self.saving, None
                # A stop may have to wait for one that was just begun, and for the last one.
                self.time_limit.saved(self.checkpointer.seconds * (2 if self.config.run.async_save else 1))
                self.writer.message(f"checkpoint {path}")

    @contextmanager
    def counting_failures(self, must_succeed: bool) -> Iterator[None]:
        """Report and count a checkpoint that failed, and forget that it was the best; raise it when it must not fail."""
        try:
            yield
        except CheckpointError as error:
            if must_succeed:
                raise
            self.failed_saves += 1
            self.state.best_step, self.state.best_value = self.saved.best_step, self.saved.best_value
            self.writer.message(f"warning: {error}")

    def restore(self, path: Path) -> None:
        """Continue where the checkpoint at `path` was written."""
        self.state = self.checkpointer.load(path)
        self.saved, self.prompts.cursor = replace(self.state), self.state.cursor
        self.prompts.curriculum.history = self.state.pass_rates
        if self.collector.pool is not None:
            self.collector.pool.load_state_dict(self.state.ahead)
        self.state.ahead = []
        self.collector.step = self.state.step
        self.writer.message(f"resumed from {path} after step {self.state.step}")

    def start_clocks(self) -> None:
        """Leave out of what is measured of the next step what came before it."""
        self.timer.collect()
        if self.collector.pool is not None:
            self.collector.pool.measured()

    def with_speed(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds the seconds of each phase, tokens per second (prompts and responses), peak memory of this process, and run counters."""
        times, pool = self.timer.collect(), self.collector.pool
        speed = {"tokens_per_second": metrics["num_tokens"] / times["time/step"], "memory_gb": memory_gb()}
        speed |= idle_shares(times) | (pool.measured() if pool is not None else {})
        counters = {"weight_version": float(self.state.weight_version), "checkpoint/failures": float(self.failed_saves)}
        counters |= {"train/skipped_steps": float(self.state.skipped_steps), "mismatch/alarms": float(self.state.mismatch_alarms)}
        return metrics | times | self.synced | speed | counters


class BrokenTraining(RuntimeError):
    """More steps would learn nothing: no gradient is finite, or a reward function only raises."""
