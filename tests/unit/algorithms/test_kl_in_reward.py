"""The KL subtracted from the reward, compared with ms-swift's (tests/vectors), and sums of log-probs by sample."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.advantages import advantages_of, charged_kl, less_kl
from megagrpo.config import RunConfig
from megagrpo.types import Prompt, Rollout, ScoredRollout

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "swift_advantage.json").read_text())["cases"]
# ms-swift's centres on the group
OUR_NAMES = {"reinforce_plus_plus": ("reinforce_plus_plus_baseline", "batch"), "grpo": ("grpo", "group")}


def config(**sections) -> RunConfig:
    values = dict(
        model=dict(path="x"), data=dict(train=dict(source="x")), rewards=dict(functions=[dict(function="exact_number")])
    )
    return RunConfig.model_validate(values | sections)


def scored(reward: float) -> ScoredRollout:
    return ScoredRollout(Rollout(Prompt(0, (1,), ""), (2,), (0.0,), "stop", 0, ""), {"f": reward}, reward)


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
    penalized = less_kl(
        [scored(r) for r in rewards], torch.tensor(case["kl_values"], dtype=torch.float64), case["beta"]
    )
    assert [s.reward for s in penalized] == pytest.approx(case["rewards"])
    assert [s.rewards["f"] for s in penalized] == rewards  # reported rewards do not change
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(
        advantages_of(penalized, case["num_generations"], settings.algorithm, ()).flatten(),
        expected,
        rtol=1e-5,
        atol=1e-6,
    )


def test_what_cannot_be_scored_stays_without_advantage():
    penalized = less_kl([scored(math.nan), scored(1.0), scored(1.0)], torch.tensor([5.0, 1.0, 3.0]), 0.5)
    assert math.isnan(penalized[0].reward) and [s.reward for s in penalized[1:]] == [0.5, -0.5]
    advantages = advantages_of(penalized, 3, config().algorithm, ())
    assert advantages[0, 0] == 0 and advantages[0, 1] > 0 > advantages[0, 2]


def test_a_masked_response_pays_the_mean_kl_of_its_group():
    masked = replace(scored(1.0), rollout=replace(scored(1.0).rollout, finish_reason="length"))
    rows, kl = [masked, scored(1.0), scored(1.0), masked, masked, masked], torch.tensor([0.0, 2.0, 4.0, 0.0, 0.0, 0.0])
    algorithm = dict(beta=0.5, kl_in_reward=True, kl_estimator="k1", scale_rewards="none")
    assert charged_kl(rows, kl, 3, mask_truncated=False) is kl
    settings = config(algorithm=algorithm | dict(mask_truncated_completions=True), rollout=dict(num_generations=3))
    charged = charged_kl(rows, kl, 3, mask_truncated=True)
    assert charged.tolist() == [3.0, 2.0, 4.0, 0.0, 0.0, 0.0]
    first, second = advantages_of(less_kl(rows, charged, 0.5), 3, settings.algorithm, ())
    assert first[0] == 0 < first[1] == -first[2] and not second.any()
