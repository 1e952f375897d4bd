"""Alarms of a run: abnormal train/rollout mismatch, skipped optimizer steps, reward functions that always raise."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megagrpo.config import RolloutSection, RunConfig
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.find_nan import NonFiniteError
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.sync.trainer_side.transport import Weights
from megagrpo.train_types import TrainState
from megagrpo.trainer.saving.saves import Saves
from megagrpo.weights.files.tensor_files import dtype_name

FIRST_STEPS = 5  # the mismatch of the first steps is the run's baseline
FLAT_STEPS = 10  # steps in a row with equal rewards, before a task is reported
JUMP = 3.0  # alarm when the mismatch is this many times as far from 1 as the baseline
# upper limit of `token_mult_prob_error` in healthy runs; in bf16 it grows with the entropy
NORMAL = {"float32": 1.01, "float16": 1.03, "bfloat16": 1.1}


class BrokenTraining(RuntimeError):
    """More steps cannot learn anything: gradients are never finite, or a reward function always raises."""


@dataclass
class Alarms:
    """Counts and reports faults of a step, and stops a run that can no longer learn. The counts are in `state`.

    `dtype` is the least precise compute dtype of trainer and engine; with `quantizes` one of them computes in fewer
    bits. `say` prints a line for the user.
    """

    rollout: RolloutSection
    max_skipped_steps: int
    state: TrainState
    layout: Layout
    dtype: str
    quantizes: bool
    reward_tracebacks: Callable[[Sequence[str]], str]
    say: Callable[[str], None]
    group_sizes: Mapping[str, int] = field(default_factory=dict)  # by task
    flat_steps: Counter[str] = field(default_factory=Counter)  # of each task, in a row

    def check_mismatch(self, metrics: dict[str, float]) -> None:
        """Count and report a step whose train/rollout mismatch is above normal."""
        error, first = metrics.get("token_mult_prob_error"), self.state.first_mismatches
        if error is None:
            return
        limit = mismatch_limit(self.rollout, self.dtype, self.quantizes, first)
        if limit is not None and error > limit:
            self.state.mismatch_alarms += 1
            self.say(mismatch_warning(self.rollout, self.dtype, self.state.step, error, limit, first))
        if len(first) < FIRST_STEPS and math.isfinite(error):
            self.state.first_mismatches = [*first, error]

    def check_tasks(self, metrics: dict[str, float]) -> None:
        """Report a task of which all groups had equal rewards in each of the last `FLAT_STEPS` steps with the task."""
        for name in [name for name in metrics if name.startswith("tasks/") and name.endswith("/frac_reward_zero_std")]:
            task = name.removeprefix("tasks/").removesuffix("/frac_reward_zero_std")
            self.flat_steps[task] = self.flat_steps[task] + 1 if metrics[name] == 1 else 0
            if self.flat_steps[task] == FLAT_STEPS:
                reward = metrics[f"tasks/{task}/reward"]
                self.say(
                    f"warning: step {self.state.step}: task {task}: all groups of its last {FLAT_STEPS} steps have "
                    f"equal rewards (now {reward:.4g}), so it teaches nothing. If it is solved, lower "
                    f"tasks.{task}.weight; else look at its responses and rewards in completions.jsonl"
                )

    def count_skip(self, error: NonFiniteError, weights: Weights) -> None:
        """Count and report a skipped optimizer step, with its non-finite tensor's Hugging Face name. Collective."""
        self.state.skipped_steps += 1
        self.state.skipped_in_a_row += 1
        tensor, where = error.tensor, "in the loss, not in a gradient"
        if tensor is not None:
            blocks = next((blocks for name, _, blocks in weights if name == tensor.name), [])
            own = sorted({block.name for block in blocks}) or [tensor.name]
            names = self.layout.broadcast_object(own, tensor.rank)
            where = f"in the {tensor.kind} of {', '.join(names)} on rank {tensor.rank}"
        self.say(
            f"warning: step {self.state.step + 1}: optimizer step skipped, weights unchanged: NaN or infinity {where}"
            f"{error.about}; loss {error.loss:g}; skipped in a row {self.state.skipped_in_a_row} of "
            f"{self.max_skipped_steps} allowed"
        )

    def stop_if_rewards_raise(self, metrics: dict[str, float], saves: Saves) -> None:
        """Save and raise BrokenTraining on every rank when a reward function failed for a whole step. Collective."""
        failing = always_raising(metrics, self.rollout, self.group_sizes)
        if not failing:
            return
        tracebacks = self.reward_tracebacks(failing)
        saves.save(must_succeed=False)
        raise BrokenTraining(
            f"rewards.functions: {', '.join(failing)} failed for every response of step {self.state.step}; correct the "
            f"function and "
            f"continue with --resume. Its first failure:\n{tracebacks}"
        )

    def stop_if_skipping(self) -> None:
        """Raise BrokenTraining on every rank when too many optimizer steps in a row were skipped."""
        if self.state.skipped_in_a_row >= self.max_skipped_steps:
            raise BrokenTraining(
                f"train.max_skipped_steps: {self.state.skipped_in_a_row} optimizer steps in a row had NaN or infinity; "
                "the warnings name the tensors. Resume from a checkpoint with a lower train.learning_rate, or look "
                "into a step with debug.dump_steps"
            )


def make_alarms(
    config: RunConfig,
    state: TrainState,
    policy: MegatronPolicy,
    engine_dtype: str,
    reward_tracebacks: Callable[[Sequence[str]], str],
    say: Callable[[str], None],
) -> Alarms:
    """Return the alarms of a run with this policy."""
    dtype = max(dtype_name(policy.dtype), engine_dtype, key=tuple(NORMAL).index)
    of_model = config.model.fp8_recipe, config.model.base_storage
    quantizes = {config.rollout.quantization, *of_model} != {"none"}
    limits, sizes = (config.rollout, config.train.max_skipped_steps), config.group_sizes
    return Alarms(*limits, state, policy.layout, dtype, quantizes, reward_tracebacks, say, sizes)


def mismatch_limit(rollout: RolloutSection, dtype: str, quantizes: bool, first: Sequence[float]) -> float | None:
    """Return the highest normal `token_mult_prob_error` of a step; None: no limit.

    `dtype` and `quantizes` are those of `Alarms`. `first` holds the first steps' errors, at most `FIRST_STEPS`.
    """
    if rollout.mismatch_threshold is not None:
        return rollout.mismatch_threshold
    # training between sampling and the log-probs changes the number, too
    if rollout.max_staleness or rollout.kept.path is not None:
        return None
    usual = 1 + JUMP * (statistics.median(first) - 1) if len(first) == FIRST_STEPS else None
    if quantizes:  # the normal value depends on the model
        return usual and max(usual, NORMAL["bfloat16"])
    return max(usual or 1.0, NORMAL[dtype])


def mismatch_warning(
    rollout: RolloutSection, dtype: str, step: int, error: float, limit: float, first: Sequence[float]
) -> str:
    """Return the warning text for a step whose error is above `limit`."""
    if rollout.mismatch_threshold is not None:
        rule = f"rollout.mismatch_threshold {limit:g}"
    else:
        usual = (
            f" and {statistics.median(first):.4g} in the first {len(first)} steps" if len(first) == FIRST_STEPS else ""
        )
        rule = f"{limit:.4g} (normal: up to {NORMAL[dtype]:g} in {dtype}{usual})"
    return (
        f"warning: step {step}: token_mult_prob_error {error:.6g} is above {rule}: vLLM samples from another "
        "distribution than the trainer computes. After a jump, check weight_version in completions.jsonl and the "
        "server's log. From the first step on, check rollout.quantization and rollout.extra_args, try "
        "model.precision=fp32, and audit a dumped step"
    )


def always_raising(metrics: dict[str, float], rollout: RolloutSection, sizes: Mapping[str, int]) -> list[str]:
    """Return the reward functions that failed for every response of the step. `sizes` are those of groups, by task."""
    drawn = metrics.get("dynamic_sample/groups_drawn", rollout.prompts_per_step)
    counts = {
        name.removeprefix("rewards/").removesuffix("/exceptions"): count
        for name, count in metrics.items()
        if name.startswith("rewards/") and name.endswith("/exceptions") and count
    }
    # a function of a task scores the task's groups only
    tasks = {name: name.partition("/")[0] for name in counts}
    groups = {name: metrics.get(f"tasks/{task}/groups", drawn) for name, task in tasks.items()}
    size = {name: sizes.get(task, rollout.num_generations) for name, task in tasks.items()}
    return [name for name, count in counts.items() if count >= groups[name] * size[name]]
