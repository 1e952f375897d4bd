"""The KL subtracted from the reward, compared with ms-swift's (tests/vectors), and sums of log-probs by sample."""

import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.advantages import advantages_of, charged_kl, less_kl
from megagrpo.config import RunConfig

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "swift_advantage.json").read_text())["cases"]
# ms-swift's centres on the group
OUR_NAMES = {"reinforce_plus_plus": ("reinforce_plus_plus_baseline", "batch"), "grpo": ("grpo", "group")}


def config(**sections) -> RunConfig:
    values = dict(
        model=dict(path="x"), data=dict(train=dict(source="x")), rewards=dict(functions=[dict(function="exact_number")])
    )
    return RunConfig.model_validate(values | sections)


@pytest.mark.parametrize("case", [c for c in CASES if "kl_values" in c], ids=lambda c: c["name"])
def test_advantages_are_ms_swifts(case):
    estimator, scale = OUR_NAMES[case["advantage_estimator"]]
    algorithm = dict(
        beta=case["beta"], kl_in_reward=True, kl_estimator="k1", advantage_estimator=estimator, scale_rewards=scale
    )
    settings = config(algorithm=algorithm, rollout=dict(num_generations=case["num_generations"]))
    # A response without any score counts as 0 in ms-swift; ours leaves it out of its group.
    rewards = [
        sum(w * (r or 0) for w, r in zip(case["reward_weights"], row, strict=True)) for row in case["rewards_per_func"]
    ]
    given = torch.tensor(rewards, dtype=torch.float64).view(-1, case["num_generations"])
    penalized = less_kl(given, torch.tensor(case["kl_values"], dtype=torch.float64).view_as(given), case["beta"])
    assert penalized.flatten().tolist() == pytest.approx(case["rewards"])
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(
        advantages_of(penalized, given[..., None], settings.algorithm, ()).flatten(), expected, rtol=1e-5, atol=1e-6
    )


def test_what_cannot_be_scored_stays_without_advantage():
    rewards = torch.tensor([[math.nan, 1.0, 1.0]], dtype=torch.float64)
    penalized = less_kl(rewards, torch.tensor([5.0, 1.0, 3.0]), 0.5)
    assert math.isnan(penalized[0, 0]) and penalized[0, 1:].tolist() == [0.5, -0.5]
    advantages = advantages_of(penalized, rewards[..., None], config().algorithm, ())
    assert advantages[0, 0] == 0 and advantages[0, 1] > 0 > advantages[0, 2]


def test_a_masked_response_pays_the_mean_kl_of_its_group():
    masked, kl = torch.tensor([[1, 0, 0], [1, 1, 1]]).bool(), torch.tensor([[0.0, 2.0, 4.0], [0.0, 0.0, 0.0]])
    rewards = torch.ones(2, 3, dtype=torch.float64)
    algorithm = dict(beta=0.5, kl_in_reward=True, kl_estimator="k1", scale_rewards="none")
    assert charged_kl(masked, kl, mask_truncated=False) is kl
    settings = config(algorithm=algorithm | dict(mask_truncated_completions=True), rollout=dict(num_generations=3))
    charged = charged_kl(masked, kl, mask_truncated=True)
    assert charged.tolist() == [[3.0, 2.0, 4.0], [0.0, 0.0, 0.0]]
    first, second = advantages_of(less_kl(rewards, charged, 0.5), rewards[..., None], settings.algorithm, ())
    assert first[0] == 0 < first[1] == -first[2] and not second.any()
