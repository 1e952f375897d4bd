"""Validation of reward values: a finite number of moderate size, or None for "cannot score"."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

LARGEST = 1e15  # limit on a reward's magnitude: sums of such squares still fit into float32


def reward_of(value: Any) -> float:
    """Convert a reward to float64. Booleans, numbers, and scalars of NumPy and torch are accepted; text and containers are not.

    Raises TypeError that names the type of another value, ValueError for a number that is not finite or larger than LARGEST.
    """
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"it returned a {type(value).__name__}, {value!r:.100}; a reward must be a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, which is not finite")
    if abs(number) > LARGEST:
        raise ValueError(f"it returned {number:g}; a reward must lie within ±{LARGEST:g}, or the statistics of a step overflow float32")
    return number


def rewards_of(values: Any, count: int) -> list[float | str | None]:
    """Convert the rewards of `count` completions. Each is a number, None, or an error text that concerns this completion only.

    Raises TypeError or ValueError when `values` is not a list-like iterable, or has another length.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes | dict | set | frozenset) or not isinstance(values, Iterable):
        raise TypeError(f"it returned a {type(values).__name__}; a reward function returns a list, one number or None per completion")
    values = list(values)
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} rewards for {count} completions")
    return [None if value is None else _reward_or_problem(value) for value in values]


def _reward_or_problem(value: Any) -> float | str:
    try:
        return reward_of(value)
    except (TypeError, ValueError) as error:
        return str(error)
