"""Rewards of the turns and tokens of a trajectory, from what several reward functions returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megagrpo.types import PartRewards, Rollout


class Returned(NamedTuple):
    """What a reward function returned for a trajectory."""

    name: str
    per: str  # `RewardFunction.per`
    weight: float
    value: float | None  # the reward of the trajectory; None: it could not be scored
    row: (
        list[float | None] | None
    )  # of its turns or tokens, whose sum is `value`; None: the function gave no such rewards


def part_rewards(rollout: Rollout, returned: Sequence[Returned]) -> PartRewards | None:
    """Return the weighted sums of what the functions returned for turns and tokens; None without any."""
    if all(r.row is None for r in returned):
        return None
    whole = [r.weight * r.value for r in returned if r.value is not None and (r.row is None or r.per == "turn")]
    own = {} if rollout.dialogue is None else rollout.dialogue.rewards
    whole += [value for value in own.values() if value is not None]
    by_turn = {r.name: tuple(r.row) for r in returned if r.row is not None and r.per == "turn"}
    turns: tuple[float | None, ...] = ()
    if by_turn:
        weights = [1.0, *(r.weight for r in returned if r.name in by_turn)]
        schedulers = [turn.reward for sample in rollout.samples for turn in sample.turns]
        turns = tuple(weighted_sum(values, weights) for values in zip(schedulers, *by_turn.values(), strict=True))
    rows = [r.weight * np.array(r.row, np.float64) for r in returned if r.row is not None and r.per == "token"]
    return PartRewards(total(whole), by_turn, turns, rollout.spread(_summed(rows), math.nan) if rows else ())


def _summed(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of the rows [n] without their NaN; NaN where all of them are."""
    table = np.stack(rows)
    return np.where(np.isnan(table).all(0), math.nan, np.nansum(table, axis=0))


def weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted sum of the known values; None without any."""
    known = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return math.fsum(known) if known else None


def total(values: Sequence[float]) -> float:
    """Return the sum; NaN without any value."""
    return math.fsum(values) if values else math.nan
