import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.advantages import group_advantages, reward_statistics, to_samples
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.types import Prompt, Rollout, ScoredRollout
from tests.unit.for_each import for_each

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "advantages.json").read_text())["cases"]


def summed_rewards(case):
    weights = case["reward_weights"] or [1.0] * len(case["rewards_per_func"][0])
    rows = [[w * r for w, r in zip(weights, row, strict=True) if r is not None] for row in case["rewards_per_func"]]
    return torch.tensor([sum(row) if row else math.nan for row in rows]).double().view(-1, case["num_generations"])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_advantages_equal_those_trl_computes(case):
    advantages = group_advantages(summed_rewards(case), case["scale_rewards"])
    torch.testing.assert_close(advantages.flatten(), torch.tensor(case["advantages"]).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda c: c["name"])
def test_reward_statistics_equal_those_trl_logs(case):
    statistics = reward_statistics(summed_rewards(case))
    assert statistics["reward"] == pytest.approx(case["metrics"]["reward"])
    assert statistics["reward_std_batch"] == pytest.approx(case["metrics"]["reward_std"])
    assert statistics["frac_reward_zero_std"] == pytest.approx(case["metrics"]["frac_reward_zero_std"])


def test_reward_std_is_the_mean_of_the_groups_stds():
    statistics = reward_statistics(torch.tensor([[0.0, 1.0], [1.0, 4.0]]))
    assert statistics["reward_std"] == pytest.approx((math.sqrt(0.5) + math.sqrt(4.5)) / 2)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_gets_exactly_zero_even_when_its_mean_rounds(scale):
    rewards = torch.tensor([[0.1] * 3, [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert group_advantages(rewards, scale)[0].tolist() == [0.0, 0.0, 0.0]
    assert group_advantages(rewards, scale)[1].abs().min() > 0


DUST = {
    "sums of floats": [0.1 + 0.2, 0.3, 0.3],
    "weighted sums that cancel": [0.1 + 0.2 - 0.3, 0.0, 0.0],
    "large": [1e8 / 3 * 3 + 1e-8, 1e8, 1e8],
    "with one that nothing could score": [0.7 * 3, 2.1, math.nan],
}


@for_each("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
@for_each("rewards", DUST.values())
def test_rewards_that_differ_by_rounding_only_teach_nothing(rewards, estimator):
    rows = torch.tensor([rewards, [0.0, 1.0, 0.0], [1e8, 1e8 + 1e-3, 1e8]], dtype=torch.float64)
    advantages = group_advantages(rows, "none", estimator)
    assert not advantages[0].any() and advantages[1].all() and advantages[2].all()
    assert reward_statistics(rows)["frac_reward_zero_std"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_infinite_reward_is_refused(scale):
    with pytest.raises(ValueError, match="rewards must be finite, or NaN"):
        group_advantages(torch.tensor([[1.0, math.inf], [0.0, 1.0]]), scale)


def test_a_batch_without_any_score_has_no_statistics_and_no_gradient():
    rewards = torch.full((2, 3), math.nan)
    assert group_advantages(rewards, "batch").abs().max() == 0
    assert reward_statistics(rewards) == {"frac_reward_zero_std": 1.0}


def test_ungrouped_rewards_are_refused():
    with pytest.raises(ValueError, match="prompts, generations"):
        group_advantages(torch.zeros(4), "group")


def scored(reward, response=(7, 8, 9)):
    prompt = Prompt(prompt_id=0, token_ids=(1, 2), messages="hi")
    logprobs = tuple(-0.5 * (i + 1) for i in range(len(response)))
    return ScoredRollout(Rollout(prompt, response, logprobs, "stop", 0, "x"), {"f": reward}, reward)


def test_samples_carry_the_response_mask_logprobs_and_advantage():
    rollouts = [scored(1.0), scored(0.0)]
    advantages = group_advantages(StepSamples.of(rollouts).rewards(2), "none")
    first, second = to_samples(rollouts, advantages)
    assert first.token_ids.tolist() == [1, 2, 7, 8, 9]
    assert first.response_mask.tolist() == [False, False, True, True, True]
    assert first.rollout_logprobs.tolist() == [0, 0, -0.5, -1.0, -1.5]
    assert (first.advantage, second.advantage) == (0.5, -0.5)


def test_samples_carry_the_inputs_of_their_prompt_without_copies():
    image = {"pixels": torch.ones(2, 2)}
    rollouts = [
        replace(s, rollout=replace(s.rollout, prompt=replace(s.rollout.prompt, inputs=image)))
        for s in (scored(1.0), scored(0.0))
    ]
    assert all(sample.inputs is image for sample in to_samples(rollouts, torch.zeros(1, 2)))


def test_broken_groups_are_refused():
    with pytest.raises(ValueError, match="3 rollouts are not whole groups of 2"):
        StepSamples.of([scored(1.0)] * 3).rewards(2)
