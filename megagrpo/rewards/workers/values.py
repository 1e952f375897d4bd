"""Validation of reward values: a finite number of moderate size, or None for "cannot score"."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Set, Sized
from itertools import islice
from typing import Any

LARGEST = 1e15  # limit on a reward's magnitude: sums of such squares still fit into float32
# a value may be deep or large, or its own repr may raise
_SHORT = reprlib.Repr(maxstring=100, maxother=100, maxlong=100)


class InvalidRewards(ValueError):
    """User code returned no list of one value per completion, or no reward. Calling it again cannot help."""


def reward_of(value: Any) -> float:
    """Convert a reward to float64. Booleans, numbers, and scalars of NumPy and torch are accepted; text and containers
    are not.

    Raises TypeError that names the type of another value, ValueError for a number that is not finite or larger than
    LARGEST.
    """
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"it returned a {type(value).__name__}, {_SHORT.repr(value)}; a reward must be a number or None"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, which is not finite")
    if abs(number) > LARGEST:
        raise ValueError(
            f"it returned {number:g}; a reward must lie within ±{LARGEST:g}, or the statistics of a step overflow "
            f"float32"
        )
    return number


def rewards_of(values: Any, count: int) -> list[float | str | None]:
    """Convert the rewards of `count` completions. Each is a number, None, or an error text that concerns this
    completion only.

    Raises InvalidRewards when `values` is not a list-like iterable, or has another length.
    """
    fix = "return a list, one number or None per completion, in their order"
    if getattr(values, "ndim", 1) > 1:
        raise InvalidRewards(
            f"it returned an array of shape {tuple(values.shape)} for {count} completions; {fix}: shape ({count},)"
        )
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable):
        what = "None" if values is None else f"a {type(values).__name__}"
        raise InvalidRewards(f"it returned {what} for {count} completions; {fix}")
    listed = list(islice(values, count + 1))  # an iterator may be endless
    if len(listed) != count:
        returned = (
            len(values) if isinstance(values, Sized) else f"more than {count}" if len(listed) > count else len(listed)
        )
        raise InvalidRewards(f"it returned {returned} rewards for {count} completions; {fix}")
    return [None if value is None else _reward_or_problem(value) for value in listed]


def _reward_or_problem(value: Any) -> float | str:
    try:
        return reward_of(value)
    except (TypeError, ValueError) as error:
        return str(error)
