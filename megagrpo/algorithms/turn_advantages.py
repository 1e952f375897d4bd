"""Advantages of turns: each token of a turn gets the advantage of its trajectory plus that of its turn.

    A(turn) = A(trajectory) + turn_advantage_weight * A_turn(turn)

`advantage_by: turn` (MT-GRPO, Zeng et al. 2025, arXiv 2505.11821): A_turn compares the turn's reward with the rewards
of the turns with the same number in the trajectories of the prompt. A turn without a reward adds 0. Rewards of later
turns are not added: with the sum of later normalized rewards, the number of baselines would depend on when the policy
ends, which biases the gradient.

`advantage_by: state` (GiGPO, Feng et al. 2025, arXiv 2505.10978): A_turn compares the discounted return
from the turn on, sum of turn_discount^d times the reward d turns later, with the returns of the turns that answered the
same state, in all trajectories of the prompt. The rest of the trajectory's reward, which no turn has, counts at its
last turn. A state that occurs once adds 0.

Both divide by the unbiased standard deviation of the compared values (`scale_rewards: group`), or by nothing (`none`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megagrpo.algorithms.advantages import REWARD_ROUNDING, STD_EPSILON
from megagrpo.config import AlgorithmSection


@dataclass(frozen=True)
class Turns:
    """The K turns of a step, by trajectory, in order.

    >>> turns = Turns(np.array([1.0, 0.0, 0.0]), np.array([0, 0, 1]), np.zeros(3, np.int64))
    >>> turns.numbers.tolist()
    [0, 1, 0]
    """

    rewards: np.ndarray  # [K] float64; NaN: none
    trajectories: np.ndarray  # [K] int64, ascending indices of the N trajectories
    states: np.ndarray  # [K] int64, equal for equal observations before the turn

    @property
    def numbers(self) -> np.ndarray:
        """[K] int64: the number of each turn in its trajectory, from 0."""
        return np.arange(self.trajectories.size) - np.searchsorted(self.trajectories, self.trajectories)


def turn_advantages(
    turns: Turns, rewards: np.ndarray, advantages: np.ndarray, groups: np.ndarray, algorithm: AlgorithmSection
) -> np.ndarray:
    """Return the advantages [K] float64 of turns of trajectories with `rewards`, `advantages` and `groups` [N]."""
    values, compared = turns.rewards, turns.numbers
    if algorithm.advantage_by == "state":
        values, compared = discounted_returns(turns, rewards, algorithm.turn_discount), turns.states
    pairs = np.stack([groups[turns.trajectories], compared])
    _, among = np.unique(pairs, axis=1, return_inverse=True)
    own = compared_in_groups(values, among.reshape(-1), algorithm.scale_rewards == "group")
    return advantages[turns.trajectories] + algorithm.turn_advantage_weight * own


def discounted_returns(turns: Turns, rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return [K] float64: the discounted sum of the rewards of each turn and later ones of its trajectory. What the
    trajectories' `rewards` [N] have beyond their turns' counts at the last turn; NaN if a trajectory has no reward."""
    known, owners = np.nan_to_num(turns.rewards), turns.trajectories
    returns, numbers = known.copy(), turns.numbers
    last = np.append(owners[1:] != owners[:-1], True)[: owners.size]
    returns[last] += (rewards - np.bincount(owners, known, rewards.size))[owners[last]]
    for number in range(int(numbers.max(initial=0)) - 1, -1, -1):
        chosen = np.flatnonzero((numbers == number) & ~last)
        returns[chosen] += discount * returns[chosen + 1]
    return returns


def compared_in_groups(values: np.ndarray, groups: np.ndarray, scaled: bool) -> np.ndarray:
    """Return [K] float64: each value minus the mean of its group's values, over their standard deviation if `scaled`.
    `groups` [K] are numbers from 0. 0 for NaN, which no group counts, and in a group of equal values."""
    result, known = np.zeros(values.size), np.flatnonzero(~np.isnan(values))
    of, values = groups[known], values[known]
    counts = np.bincount(of).clip(min=1)
    centred = values - (np.bincount(of, values) / counts)[of]
    largest = np.ones(counts.size)
    np.maximum.at(largest, of, np.abs(values))
    centred[np.abs(centred) <= REWARD_ROUNDING * largest[of]] = 0.0
    if scaled:
        deviations = np.sqrt(np.bincount(of, centred**2) / (counts - 1).clip(min=1))
        centred /= deviations[of] + STD_EPSILON
    result[known] = centred
    return result
