"""Converts rewards to advantages, one response at a time, as the descriptions of `algorithm.advantage_estimator` and
related keys define them. NaN means no reward."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from megagrpo.config import AlgorithmSection

STD_EPSILON = 1e-4
ROUNDING = 1e-12  # relative to the largest reward or 1: a smaller distance from the mean is 0


def weighted_sum(rewards: Sequence[float | None], weights: Sequence[float]) -> float:
    """Return the weighted sum of the functions that scored; NaN if no function did."""
    scored = [weight * reward for reward, weight in zip(rewards, weights, strict=True) if reward is not None]
    return sum(scored) if scored else math.nan


def advantages(
    table: Sequence[Sequence[float | None]], weights: Sequence[float], group_size: int, algorithm: AlgorithmSection
) -> list[float]:
    """Return an advantage per row of `table`: one response's rewards by function. A prompt's responses are adjacent."""
    if algorithm.multi_objective_aggregation == "normalize_then_sum":
        return _whiten(_sums_of_normalized(table, weights, group_size))
    rewards = [weighted_sum(row, weights) for row in table]
    if algorithm.advantage_estimator == "reinforce_plus_plus":
        return _whiten(rewards)
    centred: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        centred += [
            _compared(reward, group[:i] + group[i + 1 :], algorithm.advantage_estimator)
            for i, reward in enumerate(group)
        ]
    if algorithm.advantage_estimator == "reinforce_plus_plus_baseline":
        return [_divided(value, centred) for value in centred]
    if algorithm.scale_rewards == "none":
        return [0.0 if math.isnan(value) else value for value in centred]
    groups = [rewards[i - i % group_size :][:group_size] for i in range(len(rewards))]
    return [
        _divided(value, rewards if algorithm.scale_rewards == "batch" else group)
        for value, group in zip(centred, groups, strict=True)
    ]


def _compared(reward: float, others: Sequence[float], estimator: str) -> float:
    """Return the reward minus its group's mean, for rloo minus the mean of the others; 0 without others."""
    known = _known(others)
    if math.isnan(reward) or not known:
        return math.nan if math.isnan(reward) else 0.0
    return _difference(reward, known if estimator == "rloo" else [reward, *known])


def _difference(value: float, among: Sequence[float]) -> float:
    """Return value - mean of `among`; exactly 0 if they differ by rounding only."""
    difference = value - statistics.fmean(among)
    return 0.0 if abs(difference) <= ROUNDING * max(1.0, *map(abs, among)) else difference


def _divided(value: float, among: Sequence[float]) -> float:
    """Return value / unbiased standard deviation of `among`; 0 for NaN, undivided with fewer than two known values."""
    known = _known(among)
    if math.isnan(value) or len(known) < 2:
        return 0.0 if math.isnan(value) else value
    return value / (statistics.stdev(known) + STD_EPSILON)


def _whiten(values: Sequence[float]) -> list[float]:
    """Normalise over the whole batch: subtract the mean, divide by the standard deviation."""
    known = _known(values)
    if len(known) < 2:
        return [0.0] * len(values)
    return [_divided(_difference(value, known), known) for value in values]


def _sums_of_normalized(
    table: Sequence[Sequence[float | None]], weights: Sequence[float], group_size: int
) -> list[float]:
    """Normalise each function's rewards per group (GDPO) and return weighted sums; NaN for responses without score."""
    sums = [math.nan if all(value is None for value in row) else 0.0 for row in table]
    for column, weight in enumerate(weights):
        for start in range(0, len(table), group_size):
            cells = [row[column] for row in table[start : start + group_size]]
            group = [math.nan if value is None else value for value in cells]
            for i, value in enumerate(_whiten(group), start):
                sums[i] += weight * value
    return sums


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
