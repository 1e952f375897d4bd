"""Rewards and advantages of tokens, token by token, as `advantage_by: token` defines them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megagrpo.proof.audit.naive_advantages import ROUNDING, STD_EPSILON
from megagrpo.proof.audit.saved import Step

SUM_ROUNDING = 1e-9  # a sum of normalized rewards this close to 0 is 0


def outcomes(step: Step) -> list[float]:
    """Return the reward of each trajectory that no token has; NaN without one."""
    return [float(s.text.get("outcome", s.text["reward"])) for s in step.trajectories]


def sums(step: Step) -> Iterator[tuple[float | None, float | None, str]]:
    """Yield dumped rewards, the sums that they must equal, and the place: the reward of a function per turn and the sum
    over turns, the trajectory's reward and the sum of its outcome and of its tokens' rewards."""
    for trajectory, indices in enumerate(step.samples_in_order):
        text = step.samples[indices[-1]].text
        for name, row in text.get("rewards_by_turn", {}).items():
            known = [reward for reward in row if reward is not None]
            yield text["rewards"][name], math.fsum(known) if known else None, f"sample {trajectory} {name} by turn"
        if step.config.algorithm.advantage_by == "token":
            outcome = float(text.get("outcome", text["reward"]))
            known = [] if math.isnan(outcome) else [outcome]
            for index in indices:
                rewards = step.samples[index].token_rewards
                known += [] if rewards is None else rewards[~rewards.isnan()].tolist()
            total = math.fsum(known) if known else math.nan
            yield float(text["reward"]), total, f"sample {trajectory} by token"


def token_advantages(step: Step, advantages: Sequence[float]) -> list[Tensor]:
    """Return the advantage [L] float64 of each token of each sample: the trajectory's of `advantages`, and the sum of
    the normalized rewards of the token and of all later tokens of the trajectory."""
    algorithm, order = step.config.algorithm, step.samples_in_order
    rows = [torch.full((sample.length,), advantages[sample.trajectory]).double() for sample in step.samples]
    for first in range(0, len(order), step.group_size):
        group = order[first : first + step.group_size]
        known = [
            reward
            for indices in group
            for index in indices
            for reward in _rewards(step, index)
            if not math.isnan(reward)
        ]
        if len(known) < 2:
            continue
        mean, largest = statistics.fmean(known), max(1.0, *map(abs, known))
        scale = statistics.stdev(known) + STD_EPSILON if algorithm.scale_rewards == "group" else 1.0
        for indices in group:
            later = 0.0
            for index in reversed(indices):
                rewards = _rewards(step, index)
                for token in reversed(range(len(rewards))):
                    difference = rewards[token] - mean
                    if not math.isnan(difference) and abs(difference) > ROUNDING * largest:
                        later += difference / scale
                    if abs(later) > SUM_ROUNDING:
                        rows[index][token] += algorithm.token_advantage_weight * later
    return rows


def _rewards(step: Step, index: int) -> list[float]:
    rewards = step.samples[index].token_rewards
    return [] if rewards is None else rewards.tolist()
