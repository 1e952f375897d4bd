"""Advantages of turns against the formulas of MT-GRPO and GiGPO, turn by turn in plain Python."""

import math
import random
import statistics

import numpy as np
import pytest

from megagrpo.algorithms.turn_advantages import Turns, discounted_returns, turn_advantages
from megagrpo.config import AlgorithmSection, ConfigError, load_config
from tests.unit.for_each import for_each

EPSILON = 1e-4
GROUP = 3
GROUPS = np.repeat(np.arange(100), GROUP)  # of each trajectory
# rewards and states of the turns of six trajectories, two groups of three; the fifth has no turn
TURNS = [
    [(1.0, 7), (None, 8), (0.5, 9)],
    [(0.0, 7), (1.0, 9)],
    [(None, 7)],
    [(0.25, 7), (0.5, 7), (0.75, 7)],
    [],
    [(0.25, 7), (0.1 + 0.2, 5), (0.3, 5)],
]
REWARDS = np.array([2.5, 1.0, math.nan, 1.5, 0.0, 0.85])
ADVANTAGES = np.array([0.5, -0.5, 0.0, 1.0, -1.0, 0.125])


def table(rows=TURNS) -> Turns:
    rewards = [math.nan if reward is None else reward for row in rows for reward, _ in row]
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return Turns(np.array(rewards), owners, np.array([state for row in rows for _, state in row]))


def compared(value, group, scaled):
    known = [other for other in group if not math.isnan(other)]
    if math.isnan(value) or len(known) < 2 or abs(value - statistics.fmean(known)) < 1e-12:
        return 0.0
    difference = value - statistics.fmean(known)
    return difference / (statistics.stdev(known) + EPSILON) if scaled else difference


def naive(rows, rewards, advantages, algorithm: AlgorithmSection) -> list[float]:
    def value(trajectory, number):
        if algorithm.advantage_by == "turn":
            reward = rows[trajectory][number][0]
            return math.nan if reward is None else reward
        known = [reward or 0.0 for reward, _ in rows[trajectory]]
        known[-1] += rewards[trajectory] - sum(known)
        return sum(algorithm.turn_discount**i * reward for i, reward in enumerate(known[number:]))

    def alike(one, other):
        if one[0] // GROUP != other[0] // GROUP:
            return False
        if algorithm.advantage_by == "turn":
            return one[1] == other[1]
        return rows[one[0]][one[1]][1] == rows[other[0]][other[1]][1]

    places = [(t, i) for t, row in enumerate(rows) for i in range(len(row))]
    scaled, weight = algorithm.scale_rewards == "group", algorithm.turn_advantage_weight
    return [
        advantages[place[0]]
        + weight * compared(value(*place), [value(*other) for other in places if alike(place, other)], scaled)
        for place in places
    ]


@for_each("by", ["turn", "state"])
@for_each("scale", ["group", "none"])
@for_each("options", [{}, dict(turn_advantage_weight=0.5, turn_discount=0.5), dict(turn_discount=0.0)])
def test_turns_have_the_advantages_of_the_formula(by, scale, options):
    algorithm = AlgorithmSection(advantage_by=by, scale_rewards=scale, **options)
    found = turn_advantages(table(), REWARDS, ADVANTAGES, GROUPS, algorithm)
    assert found.tolist() == pytest.approx(naive(TURNS, REWARDS, ADVANTAGES, algorithm), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("by", ["turn", "state"])
def test_many_random_turns_have_the_advantages_of_the_formula(by):
    chance = random.Random(4)
    rows = [
        [(chance.choice([None, 0.0, chance.random()]), chance.randint(0, 3)) for _ in range(chance.randint(0, 9))]
        for _ in range(30)
    ]
    rewards, advantages = (np.array([chance.random() for _ in rows]) for _ in range(2))
    algorithm = AlgorithmSection(advantage_by=by)
    found = turn_advantages(table(rows), rewards, advantages, GROUPS, algorithm)
    assert found.tolist() == pytest.approx(naive(rows, rewards, advantages, algorithm), rel=1e-8, abs=1e-10)


def test_a_return_without_discount_is_the_reward_that_is_still_to_come():
    returns = discounted_returns(table(), REWARDS, 1.0)
    assert returns[:5].tolist() == [2.5, 1.5, 1.5, 1.0, 1.0], "the reward of the trajectory less those of earlier turns"
    assert math.isnan(returns[5]), "nothing could score the trajectory"


def test_ending_early_is_no_reason_for_another_advantage():
    """Turns of a number are compared with the turns that exist. So one group's extra turns change no other turn, and
    the turns of equal rewards have the trajectory's advantage however many follow."""
    short, long = [[(1.0, 0)], [(0.0, 0)], [(0.5, 0)]], [[(1.0, 0), (1.0, 1)], [(0.0, 0)], [(0.5, 0), (1.0, 1)]]
    algorithm, zeros = AlgorithmSection(advantage_by="turn"), np.zeros(3)
    one, other = (turn_advantages(table(rows), zeros, zeros, GROUPS, algorithm) for rows in (short, long))
    assert other[[0, 2, 3]].tolist() == one.tolist() and other[[1, 4]].tolist() == [0.0, 0.0]


def test_no_turns_at_all():
    algorithm = AlgorithmSection(advantage_by="state")
    assert turn_advantages(table([[], [], []]), np.zeros(3), np.zeros(3), GROUPS, algorithm).size == 0


BASE = """
model: {path: m}
data: {train: {source: a.jsonl}}
rewards: {functions: [{function: exact_number}]}
"""
SCHEDULER = "multi_turn: {scheduler: math_tip_trick}\n"
REFUSED = {
    "algorithm.advantage_by: turn needs conversations": ("advantage_by: turn", ""),
    "algorithm.advantage_by: turn compares rewards": ("advantage_by: turn", "multi_turn: {tools: [calculator]}\n"),
    "algorithm.advantage_by: state needs advantages before": (
        "advantage_by: state, kl_in_reward: true, kl_estimator: k1, beta: 0.1",
        SCHEDULER,
    ),
    "algorithm.advantage_by: turn compares turns within": ("advantage_by: turn, scale_rewards: batch", SCHEDULER),
    "algorithm.advantage_by: turn is not supported: loss_type gmpo": ("advantage_by: turn, loss_type: gmpo", SCHEDULER),
    "algorithm.advantage_by: state is not supported: the mask": (
        "advantage_by: state, off_policy_mask_threshold: 0.5",
        SCHEDULER,
    ),
    "algorithm.turn_discount: 0.5 only applies with advantage_by state": ("turn_discount: 0.5", ""),
    "algorithm.turn_advantage_weight: 2 only applies with advantage_by turn or state": ("turn_advantage_weight: 2", ""),
    "algorithm.scale_rewards: none has no effect: advantage_estimator": (
        "advantage_estimator: 'my.py:name', scale_rewards: none",
        "",
    ),
    "algorithm.advantage_estimator: must be 'grpo', 'rloo'": ("advantage_estimator: gpg", ""),
}


@for_each("beginning", REFUSED)
def test_what_contradicts_advantages_of_turns_is_refused(beginning, tmp_path):
    options, turns = REFUSED[beginning]
    file = tmp_path / "run.yaml"
    file.write_text(BASE + turns + f"algorithm: {{{options}}}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert beginning in str(refused.value)
