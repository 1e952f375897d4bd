"""Trainer and audit agree on which advantages are exactly 0, because samples with one are skipped."""

import random

import pytest
import torch

from megagrpo.algorithms.advantages import advantages_of
from megagrpo.config import AlgorithmSection
from megagrpo.proof.audit import naive_advantages
from tests.unit.for_each import for_each

TENTHS = [number / 10 for number in range(4)]
OPTIONS = (
    dict(),
    dict(scale_rewards="none"),
    dict(advantage_estimator="rloo"),
    dict(advantage_estimator="reinforce_plus_plus", scale_rewards="batch"),
    dict(advantage_estimator="reinforce_plus_plus_baseline", scale_rewards="batch"),
    dict(multi_objective_aggregation="normalize_then_sum"),
)


@for_each("options", OPTIONS)
@for_each("weights", [[1.0], [0.1, 0.2]])
def test_a_reward_at_the_mean_has_advantage_zero_on_both_sides(options, weights):
    """Two groups of four rewards in tenths, whose mean is rounded in its last bit."""
    algorithm, checked, chance = AlgorithmSection(**options), 0, random.Random(0)
    for _ in range(400):
        values = [chance.choice(TENTHS) for _ in range(8)]
        table = [[reward, *(values[-1 - i] for _ in weights[1:])] for i, reward in enumerate(values)]
        summed = [sum(w * reward for w, reward in zip(weights, row, strict=True)) for row in table]
        rewards = torch.tensor(summed, dtype=torch.float64).view(2, 4)
        by_function = torch.tensor(table, dtype=torch.float64).view(2, 4, len(weights))
        ours = advantages_of(rewards, by_function, algorithm, weights).flatten().tolist()
        theirs = naive_advantages.advantages(table, weights, 4, algorithm)
        assert [a == 0 for a in ours] == [a == 0 for a in theirs], (ours, theirs)
        assert ours == pytest.approx(theirs, abs=1e-9)
        checked += ours.count(0) if len(set(values[:4])) > 1 < len(set(values[4:])) else 0
    assert checked > 0
