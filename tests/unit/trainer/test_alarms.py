"""Step metrics that make the trainer warn or stop."""

from pathlib import Path

import pytest

from megagrpo.config import load_config
from megagrpo.train_types import TrainState
from megagrpo.trainer.alarms import Alarms, always_raising, mismatch_limit, mismatch_warning
from megagrpo.trainer.lifecycle import Evaluations

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
# docs/async.md
ASYNC = ("rollout.max_staleness=1", "rollout.placement=dedicated", "algorithm.importance_correction=token_truncate")
# token_mult_prob_error of healthy runs in bf16, with falling, constant and rising entropy
SOUND_BF16 = [
    [1.081, 1.074, 1.066, 1.052, 1.04, 1.031, 1.02, 1.015],
    [1.024, 1.03, 1.022, 1.048, 1.027, 1.041, 1.033, 1.036],
    [1.015, 1.017, 1.016, 1.02, 1.018, 1.04, 1.06, 1.08],
]


def alarms(errors: list[float], dtype: str, *overrides: str) -> list[int]:
    """The steps at which the trainer warns."""
    config, first, steps = load_config(CONFIG, overrides), [], []
    for step, error in enumerate(errors, 1):
        limit = mismatch_limit(config.rollout, dtype, config.rollout.quantization != "none", first)
        if limit is not None and error > limit:
            steps.append(step)
            assert mismatch_warning(config.rollout, dtype, step, error, limit, first).startswith(
                f"warning: step {step}: token_mult_prob"
            )
        first = [*first, error][:5]
    return steps


@pytest.mark.parametrize("errors", SOUND_BF16)
def test_a_sound_run_in_bf16_has_no_alarm(errors):
    assert alarms(errors, "bfloat16") == []


@pytest.mark.parametrize("errors", SOUND_BF16)
def test_a_run_in_bf16_has_an_alarm_when_the_mismatch_jumps(errors):
    assert alarms([*errors, 1.3, 1.02], "bfloat16") == [9]


def test_a_run_in_fp32_has_an_alarm_at_what_would_be_normal_in_bf16():
    assert alarms([1.00001] * 6 + [1.03], "float32") == [7]
    assert alarms([1.03, 1.00001], "float32") == [1]


def test_a_run_that_begins_far_off_warns_in_its_first_steps_and_then_at_a_jump():
    assert alarms([1.2, 1.21, 1.19, 1.2, 1.2, 1.2, 1.25, 1.7], "bfloat16") == [1, 2, 3, 4, 5, 8]


def test_quantized_servers_are_compared_with_their_own_first_steps_alone():
    quantized = ("rollout.quantization=fp8_per_channel", "algorithm.importance_correction=token_truncate")
    assert alarms([1.2, 1.21, 1.19, 1.2, 1.2, 1.2, 1.25, 1.7], "bfloat16", *quantized) == [8]


def test_generation_that_runs_ahead_has_no_alarm_but_the_users_own_limit():
    errors = [1.00001, 1.08, 1.2, 1.4, 1.1, 1.3, 1.2]
    assert alarms(errors, "float32", *ASYNC) == []
    assert alarms(errors, "float32", *ASYNC, "rollout.mismatch_threshold=1.25") == [4, 6]


def test_the_warning_says_what_is_normal():
    config = load_config(CONFIG)
    early = mismatch_warning(config.rollout, "bfloat16", 3, 1.2, 1.1, [1.01] * 2)
    assert "token_mult_prob_error 1.2 is above 1.1 (normal: up to 1.1 in bfloat16):" in early
    late = mismatch_warning(config.rollout, "bfloat16", 9, 1.5, 1.21, [1.07] * 5)
    assert "is above 1.21 (normal: up to 1.1 in bfloat16 and 1.07 in the first 5 steps):" in late


def test_a_reward_raises_always_when_it_raised_for_each_response_that_was_drawn():
    config = load_config(CONFIG)  # 8 prompts x 8 responses
    metrics = {"rewards/a/exceptions": 64.0, "rewards/b/exceptions": 63.0, "rewards/c/timeouts": 64.0}
    assert always_raising(metrics, config.rollout, config.group_sizes) == ["a"]
    assert always_raising(metrics | {"dynamic_sample/groups_drawn": 9.0}, config.rollout, {}) == []


@pytest.mark.parametrize(
    ("step", "evaluated", "due"),
    [(0, -1, True), (2, -1, False), (4, 0, True), (4, 4, False), (10, 8, True), (10, 10, False)],
)
def test_an_evaluation_is_due_once_for_its_step_also_after_a_stop(step, evaluated, due):
    """A stop that interrupts an evaluation leaves its step without one: the resumed run evaluates first."""
    calls = []
    config = load_config(CONFIG, ["evaluation.steps=4", "run.max_steps=10"])
    evaluations = Evaluations(
        ["a set"], config.evaluation, config.run, TrainState(step, evaluated=evaluated), *[None] * 5
    )
    evaluations.evaluate = lambda: calls.append(step)
    evaluations.evaluate_if_due()
    assert bool(calls) == due


def test_a_task_with_equal_rewards_in_ten_of_its_steps_is_named_once():
    said = []
    watch = Alarms(load_config(CONFIG).rollout, 3, TrainState(step=7), None, "float32", False, None, said.append)
    flat = {"tasks/sums/frac_reward_zero_std": 1.0, "tasks/sums/reward": 0.0, "tasks/code/frac_reward_zero_std": 0.5}
    for step in range(25):
        watch.check_tasks({} if step % 2 else flat)  # a step without the task does not count
    assert len(said) == 1 and said[0].startswith(
        "warning: step 7: task sums: all groups of its last 10 steps have equal"
    )
    watch.check_tasks(flat | {"tasks/sums/frac_reward_zero_std": 0.9})
    for _ in range(9):
        watch.check_tasks(flat)
    assert len(said) == 1


def test_a_function_of_a_task_raises_always_if_it_does_for_the_tasks_responses():
    rollout = load_config(CONFIG, ["rollout.prompts_per_step=8", "rollout.num_generations=4"]).rollout
    metrics = {"tasks/sums/groups": 2.0, "rewards/sums/mine/exceptions": 8.0, "rewards/sums/other/exceptions": 7.0}
    assert always_raising(metrics, rollout, {}) == ["sums/mine"]
    assert always_raising(metrics, rollout, {"sums": 3}) == ["sums/mine", "sums/other"]
