"""The rollouts that a step trains on: groups without advantage are replaced, and missing groups are filled as
configured."""

import math
import re

import pytest

from megagrpo.config import RunConfig
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.engine.http.protocol import derive_seed
from megagrpo.train_types import TrainState
from megagrpo.trainer.rollout.groups import Rollouts, redraw_size
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout

FLAT, MIXED, UNKNOWN, LONE = (1.0, 1.0), (0.0, 1.0), (math.nan, math.nan), (math.nan, 1.0)
SAMPLING = SamplingParams(1.0, 8)


class Stream:
    """Prompts 0, 1, 2, ..., with a record of the pass rates for a curriculum."""

    def __init__(self):
        self.cursor, self.told = 0, {}

    def next(self, n):
        self.cursor += n
        return [Prompt(i, (1,), "") for i in range(self.cursor - n, self.cursor)]

    def learn(self, pass_rates):
        self.told |= pass_rates
        return {}


class Replay:
    """Rewards of each prompt in the order of drawing; a pair of pairs gives the rewards of two functions."""

    def __init__(self, rewards):
        self.rewards, self.seeds, self.asked = rewards, [], []

    def collect(self, prompts, num_generations, sampling, seed):
        self.seeds.append(seed)
        self.asked.append((len(prompts), num_generations))
        scored = []
        for prompt in prompts:
            rollout = Rollout(prompt, (2,), (-1.0,), "stop", 1, "")
            for row in zip(*functions_of(self.rewards[prompt.prompt_id]), strict=True):
                known = [r for r in row if not math.isnan(r)]
                by_name = {f"f{i}": None if math.isnan(r) else r for i, r in enumerate(row)}
                scored.append(ScoredRollout(rollout, by_name, sum(known) if known else math.nan))
        return StepSamples.of(scored), {"rewards/f0/timeouts": 1.0}


def functions_of(rewards):
    return rewards if isinstance(rewards[0], tuple) else (rewards,)


def draw(rewards, prompts_per_step=3, step=4, functions=None, **algorithm):
    """(prompt ids trained on, metrics, prompts drawn, messages, seeds, pass rates)."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": {"source": "a"}},
            "rewards": {"functions": functions or [{"function": "format"}] * len(functions_of(rewards[0]))},
            "rollout": {"prompts_per_step": prompts_per_step, "num_generations": 2},
            "algorithm": {"dynamic_sample": True} | algorithm,
        }
    )
    stream, replay, said = Stream(), Replay(rewards), []
    samples, metrics = Rollouts(config, stream, replay, SAMPLING, TrainState(step), said.append).draw()
    assert [samples.own[i].rollout.prompt for i in range(len(samples))] == list(samples.prompts)
    assert samples.prompts[::2] == samples.prompts[1::2]
    return [prompt.prompt_id for prompt in samples.prompts[::2]], metrics, stream, said, replay.seeds


def test_a_step_whose_groups_all_differ_draws_once():
    trained, metrics, stream, said, seeds = draw([MIXED] * 3)
    assert (trained, stream.cursor, said, seeds) == ([0, 1, 2], 3, [], [derive_seed(42, 4)])
    assert metrics["dynamic_sample/rounds"] == 0 and metrics["dynamic_sample/groups_drawn"] == 3


def test_a_step_asks_for_its_prompts_with_its_number_of_responses_each_by_the_seed_of_the_run():
    sections = {
        "model": {"path": "m"},
        "data": {"train": {"source": "a"}},
        "rewards": {"functions": [{"function": "format"}]},
    }
    counts = {"rollout": {"prompts_per_step": 5, "num_generations": 3}, "run": {"seed": 7}}
    stream, replay = Stream(), Replay([(0.0, 0.5, 1.0)] * 5)
    config = RunConfig.model_validate(sections | counts)
    scored, _ = Rollouts(config, stream, replay, SAMPLING, TrainState(4), print).draw()
    assert (replay.asked, replay.seeds) == ([(5, 3)], [derive_seed(7, 4)])
    assert stream.cursor == 5 and len(scored) == 15


def test_groups_without_a_difference_are_replaced_by_fresh_prompts_until_the_step_is_full():
    trained, metrics, stream, said, seeds = draw([MIXED, FLAT, UNKNOWN, LONE, FLAT, FLAT, MIXED, MIXED, MIXED])
    assert trained == [0, 6, 7] and said == []
    assert stream.cursor == 9  # 3, then 3 for the missing two (one in three was useful), then 3 more
    assert seeds == [derive_seed(42, 4), derive_seed(42, 4, 1), derive_seed(42, 4, 2)]
    expected = {"rounds": 2, "groups_drawn": 9, "groups_kept": 3, "reward_drawn": (4 * 0.5 * 2 + 3 * 2 + 1) / 15}
    assert {
        name.removeprefix("dynamic_sample/"): value for name, value in metrics.items() if "/timeouts" not in name
    } == pytest.approx(expected)
    assert metrics["rewards/f0/timeouts"] == 3  # of every round


@pytest.mark.parametrize(("fallback", "trained"), [("original", [0, 1, 2]), ("partial", [1, 4])])
def test_after_the_last_round_the_step_is_filled_as_asked(fallback, trained):
    rewards = [FLAT, MIXED, FLAT, FLAT, MIXED, *[FLAT] * 10]
    found, metrics, _, said, _ = draw(rewards, max_resample_times=1, dynamic_sample_fallback=fallback)
    assert found == trained and metrics["dynamic_sample/rounds"] == 1 and metrics["dynamic_sample/groups_kept"] == 2
    assert len(said) == 1 and said[0].startswith(
        "warning: step 5: 2 of 3 groups differ in reward after 1 rounds of dynamic sampling;"
    )


def test_nothing_useful_at_all_leaves_the_original_batch_in_both_ways():
    for fallback in ("original", "partial"):
        found, metrics, stream, said, seeds = draw([FLAT] * 12, max_resample_times=3, dynamic_sample_fallback=fallback)
        assert found == [0, 1, 2] and stream.cursor == 12 and len(seeds) == 4 and len(said) == 1
        assert metrics["dynamic_sample/groups_kept"] == 0


def test_without_dynamic_sampling_every_group_stays():
    trained, metrics, stream, said, _ = draw([FLAT, MIXED, UNKNOWN], dynamic_sample=False)
    assert trained == [0, 1, 2] and stream.cursor == 3 and said == [] and metrics == {"rewards/f0/timeouts": 1.0}


def test_functions_that_cancel_in_the_sum_teach_when_each_is_normalised_by_itself():
    cancelling, flat = ((0.0, 1.0), (1.0, 0.0)), ((1.0, 1.0), (0.5, 0.5))
    useful = [((0.0, 1.0), (0.0, 1.0))] * 6
    summed = draw([cancelling, flat, *useful], 2)
    each = draw([cancelling, flat, *useful], 2, multi_objective_aggregation="normalize_then_sum")
    assert summed[0] == [2, 3] and each[0] == [0, 2]


RIGHT, SHORT = {"function": "accuracy", "name": "f0"}, {"function": "soft_overlong", "name": "f1"}
LENGTHS, MIXED_LENGTHS = ((0.0, 0.0), (0.0, -0.5)), (MIXED, (0.0, -0.5))  # accuracy, then soft_overlong


def test_accuracy_decides_which_groups_are_useful_where_soft_overlong_is_a_penalty():
    rewards = [LENGTHS, (MIXED, (0.0, 0.0)), LENGTHS, *[MIXED_LENGTHS] * 5]
    for choice, trained in ((True, [0, 1, 2]), ("outcome", [1, 3, 4]), ("f0", [1, 3, 4]), ("f1", [0, 2, 3])):
        assert draw(rewards, functions=[RIGHT, SHORT], dynamic_sample=choice)[0] == trained, choice


@pytest.mark.parametrize(
    ("choice", "functions", "reason"),
    [
        ("acc", [RIGHT, SHORT], "`acc` names none of the rewards f0, f1; name one, or set true or outcome"),
        ("outcome", [SHORT], "outcome leaves out penalties, and all rewards are: f1; name one, or set true"),
    ],
)
def test_a_reward_that_is_to_decide_must_exist(choice, functions, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        draw([LENGTHS] * 3, functions=functions, dynamic_sample=choice)


def test_the_curriculum_hears_of_all_that_was_drawn():
    _, _, stream, _, _ = draw([MIXED, FLAT, UNKNOWN, *[MIXED] * 6])
    assert stream.told == {0: 0.5, 1: 1.0, 2: 0.0} | {i: 0.5 for i in range(3, stream.cursor)}


def test_a_round_draws_what_is_expected_to_fill_the_step_and_never_more_than_a_step():
    assert [redraw_size(8, useful, 8) for useful in (0, 1, 4, 6, 7)] == [8, 8, 8, 3, 2]
