"""Validation of what reward functions return, and of what they log with TRL's `log_extra` and `log_metric`.

A reward is a finite number of moderate size, or None for "cannot score". Columns of the completions table and metrics
are reported by text when they are wrong, and change no reward. Imports little, because every worker reads this file.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Set, Sized
from itertools import islice
from typing import Any

MAX_REWARD = 1e15  # limit on a reward's magnitude: sums of such squares still fit into float32
LOG_ARGUMENTS = ("log_extra", "log_metric")  # names under which a function gets the two callables
OWN_METRICS = frozenset({"mean", "std", "timeouts", "exceptions", "unscorable", "seconds"})  # of every reward function
MOST_NAMES = 100  # columns, and metrics, of a call
MAX_NAME_LENGTH = 100  # characters

# {"columns": name -> values, "metrics": name -> number, "problems": texts}, as it travels to the trainer
Logged = dict[str, Any]
# the rewards of a completion: of the whole, or of each turn or token; None: it cannot be scored
Reward = float | list[float | None] | None
# what has a reward of its own in a completion ("turn" or "token"), and how many each completion of a call has
Parts = tuple[str, list[int]]
# a value may be deep or large, or its own repr may raise
_SHORT = reprlib.Repr(maxstring=100, maxother=100, maxlong=100)


class InvalidRewards(ValueError):
    """User code returned no list of one value per completion, or no reward. Calling it again cannot help."""


def scalar(value: Any) -> Any:
    """Convert a scalar of NumPy or torch to Python's; other values stay."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def reward_of(value: Any, subject: str = "it returned", fix: str = "a reward must be a number or None") -> float:
    """Convert a reward to float64. Accepts booleans, numbers, NumPy and torch scalars, but no text and no containers.

    Raises TypeError that names the type of another value, ValueError for a number that is not finite or larger than
    MAX_REWARD. Their texts begin with `subject`.
    """
    if not isinstance(value, numbers.Real):
        value = scalar(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{subject} a {type(value).__name__}, {_SHORT.repr(value)}; {fix}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{subject} {number}, which is not finite")
    if abs(number) > MAX_REWARD:
        raise ValueError(
            f"{subject} {number:g}; it must lie within ±{MAX_REWARD:g}, or the statistics of a step overflow float32"
        )
    return number


def rewards_of(values: Any, count: int, parts: Parts | None = None) -> list[Reward | str]:
    """Convert the rewards of `count` completions. Each is a number, None, or an error text for that completion; with
    `parts` a list of numbers or None instead of a number.

    Raises InvalidRewards when `values` is not a list-like iterable, or has another length.
    """
    one = "one number" if parts is None else f"one list with a number per {parts[0]}"
    fix = f"for {count} completions; return a list, {one} or None per completion, in their order"
    if getattr(values, "ndim", 1) > 1 and parts is None:
        raise InvalidRewards(f"it returned an array of shape {tuple(values.shape)} {fix}: shape ({count},)")
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable):
        raise InvalidRewards(f"it returned {'None' if values is None else f'a {type(values).__name__}'} {fix}")
    listed = list(islice(values, count + 1))  # an iterator may be endless
    if len(listed) != count:
        read = len(listed) if len(listed) < count else f"more than {count}"
        length = len(values) if isinstance(values, Sized) else read
        raise InvalidRewards(f"it returned {length} rewards {fix}")
    if parts is None:
        return [None if value is None else _reward_or_problem(value) for value in listed]
    rows = zip(listed, parts[1], strict=True)
    return [None if row is None else _row_or_problem(row, i, parts[0], length) for i, (row, length) in enumerate(rows)]


def _reward_or_problem(value: Any) -> float | str:
    fix = "a reward must be a number or None"
    if isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1:
        fix += "; for a number per turn or token set `per: turn` or `per: token` beside `function`"
    try:
        return reward_of(value, fix=fix)
    except (TypeError, ValueError) as error:
        return str(error)


def _row_or_problem(row: Any, completion: int, part: str, length: int) -> list[float | None] | str:
    """Return the rewards of the `length` parts of a completion, which has this index in the call."""
    fix = f"completion {completion} of the call has {length} {part}s; return a number or None for each"
    row = row.tolist() if hasattr(row, "tolist") else row
    if isinstance(row, str | bytes | bytearray | Mapping | Set) or not isinstance(row, Iterable):
        return f"it returned a {type(row).__name__}, {_SHORT.repr(row)}, but {fix}"
    listed = list(islice(row, length + 1))
    if len(listed) != length:
        read = len(row) if isinstance(row, Sized) else len(listed) if len(listed) < length else f"more than {length}"
        return f"it returned {read} rewards, but {fix}"
    rewards: list[float | None] = []
    for number, value in enumerate(listed):
        if type(value) is float and -MAX_REWARD <= value <= MAX_REWARD:  # the fast path of rewards per token
            rewards.append(value)
            continue
        try:
            rewards.append(None if value is None else reward_of(value, "it returned", "a reward is a number or None"))
        except (TypeError, ValueError) as error:
            return f"{error}, for {part} {number}; {fix}"
    return rewards


def are_rewards(values: list[Any], parts: Parts | None) -> bool:
    """Whether `values`, received from a worker, are results of `rewards_of`."""
    if parts is None:
        return all(type(value) in (float, str, type(None)) for value in values)
    return all(
        type(row) in (str, type(None))
        or (type(row) is list and len(row) == length and all(type(value) in (float, type(None)) for value in row))
        for row, length in zip(values, parts[1], strict=True)
    )


class CallLog:
    """The log of one call that scores `count` completions."""

    def __init__(self, count: int):
        self._count = count
        self._columns: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}
        # by the name they concern, so that a loop does not report each of its turns
        self._problems: dict[str, str] = {}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Add a column to the completions table: one value per completion. A later call with its name replaces it."""
        try:
            name = _checked_name(column, self._columns)
            values = values.tolist() if hasattr(values, "tolist") else values
            if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
                raise TypeError(f"the values are a {type(values).__name__}; give a list, one value per completion")
            cells = [_cell(value) for value in values]
            if len(cells) != self._count:
                raise ValueError(f"{len(cells)} values for {self._count} completions; give one per completion")
            self._columns[name] = cells
        except (TypeError, ValueError, OverflowError) as error:
            self._report("log_extra", column, error)

    def log_metric(self, name: str, value: float) -> None:
        """Add a number. Several values of one name in a call are averaged."""
        try:
            checked = _checked_name(name, self._metrics)
            if checked in OWN_METRICS:
                raise ValueError("every reward function has a metric of this name; choose another name")
            number = reward_of(value, "the value is", "give a number")
            self._metrics.setdefault(checked, []).append(number)
        except (TypeError, ValueError) as error:
            self._report("log_metric", name, error)

    def _report(self, function: str, name: Any, error: Exception) -> None:
        if len(self._problems) < MOST_NAMES:
            shown = f"{function}({str(name)!r:.{MAX_NAME_LENGTH}})"
            self._problems.setdefault(shown, f"{shown}: {error}")

    def contents(self) -> Logged:
        """Return everything that was logged, as JSON."""
        metrics = {name: math.fsum(values) / len(values) for name, values in self._metrics.items()}
        return {"columns": self._columns, "metrics": metrics, "problems": list(self._problems.values())}


def _checked_name(name: Any, known: dict[str, Any]) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name is a {type(name).__name__}; give text")
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(f"the name must have 1 to {MAX_NAME_LENGTH} printable characters")
    if name not in known and len(known) >= MOST_NAMES:
        raise ValueError(f"the limit is {MOST_NAMES} names per call; use fewer")
    return str(name)


def _cell(value: Any) -> Any:
    value = scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral) and abs(int(value)) < 2**63:
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else None
    raise TypeError(
        f"a value is a {type(value).__name__}, {value!r:.100}; a value is text, a number, a boolean or None"
    )


def is_logged(value: Any, count: int) -> bool:
    """Whether `value`, received from a worker, is the log of a call that scored `count` completions."""
    match value:
        case {"columns": dict() as columns, "metrics": dict() as metrics, "problems": list() as problems}:
            lists = columns.values()
            are_columns = all(isinstance(c, list) and len(c) == count and all(map(_is_cell, c)) for c in lists)
            are_metrics = all(type(number) is float and math.isfinite(number) for number in metrics.values())
            return are_columns and are_metrics and all(type(problem) is str for problem in problems)
    return False


def _is_cell(value: Any) -> bool:
    return type(value) in (str, int, bool, type(None)) or (type(value) is float and math.isfinite(value))
