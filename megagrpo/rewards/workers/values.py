"""What a reward may be: a finite number of moderate size, or None for "cannot score"."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

LARGEST = 1e15  # of a reward's magnitude: the squares of many such still fit into float32


def reward_of(value: Any) -> float:
    """A reward as float64. Booleans, numbers, and numbers of numpy and torch are numbers; text and containers are not.

    TypeError names the type of a value that is no number; ValueError names a number that is not finite or larger than LARGEST.
    """
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"it gave a {type(value).__name__}, {value!r:.100}, and not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"it gave {number}, which is no finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"it gave {number:g}; a reward must lie within ±{LARGEST:g}, or the statistics of a step overflow float32")
    return number


def rewards_of(values: Any, count: int) -> list[float | str | None]:
    """The rewards of `count` completions: a number, None, or the text of what is wrong with the value of this completion alone.

    TypeError or ValueError when `values` is no list, or has another length.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes | dict | set | frozenset) or not isinstance(values, Iterable):
        raise TypeError(f"it gave a {type(values).__name__}; a reward function gives a list, one number or None per completion")
    values = list(values)
    if len(values) != count:
        raise ValueError(f"gave {len(values)} rewards for {count} completions")
    return [None if value is None else _reward_or_problem(value) for value in values]


def _reward_or_problem(value: Any) -> float | str:
    try:
        return reward_of(value)
    except (TypeError, ValueError) as error:
        return str(error)
