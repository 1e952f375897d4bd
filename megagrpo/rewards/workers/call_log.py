"""What a reward function logs during one call, with TRL's `log_extra` and `log_metric`: columns of the completions
table, and numbers.

Imports little, because every worker process reads this file. A wrong use of the two changes no reward: it is reported
by text.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from megagrpo.rewards.workers.values import LARGEST

ARGUMENTS = ("log_extra", "log_metric")  # names under which a function gets the two callables
OWN_METRICS = frozenset({"mean", "std", "timeouts", "exceptions", "unscorable", "seconds"})  # of every reward function
MOST_NAMES = 100  # columns, and metrics, of a call
LONGEST_NAME = 100  # characters

# {"columns": name -> values, "metrics": name -> number, "problems": texts}, as it travels to the trainer
Logged = dict[str, Any]


class CallLog:
    """The log of one call that scores `count` completions."""

    def __init__(self, count: int):
        self._count = count
        self._columns: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}
        # by the name they concern, so that a loop does not report each of its turns
        self._problems: dict[str, str] = {}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Add a column to the completions table: one value per completion of the call. A later call with the same name
        replaces it."""
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
            number = _number(value)
            self._metrics.setdefault(checked, []).append(number)
        except (TypeError, ValueError, OverflowError) as error:
            self._report("log_metric", name, error)

    def _report(self, function: str, name: Any, error: Exception) -> None:
        if len(self._problems) < MOST_NAMES:
            shown = f"{function}({str(name)!r:.{LONGEST_NAME}})"
            self._problems.setdefault(shown, f"{shown}: {error}")

    def contents(self) -> Logged:
        """Return everything that was logged, as JSON."""
        metrics = {name: math.fsum(values) / len(values) for name, values in self._metrics.items()}
        return {"columns": self._columns, "metrics": metrics, "problems": list(self._problems.values())}


def _checked_name(name: Any, known: dict[str, Any]) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name is a {type(name).__name__}; give text")
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise ValueError(f"the name must have 1 to {LONGEST_NAME} printable characters")
    if name not in known and len(known) >= MOST_NAMES:
        raise ValueError(f"the limit is {MOST_NAMES} names per call; use fewer")
    return str(name)


def _scalar(value: Any) -> Any:
    """Convert a scalar of NumPy or torch to Python's; others stay."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _cell(value: Any) -> Any:
    value = _scalar(value)
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


def _number(value: Any) -> float:
    value = _scalar(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the value is a {type(value).__name__}, {value!r:.100}; give a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the value is {number}, which is not finite")
    if abs(number) > LARGEST:
        raise ValueError(f"the value is {number:g}; it must lie within ±{LARGEST:g}, as a reward")
    return number


def is_logged(value: Any, count: int) -> bool:
    """Whether `value`, received from a worker, is the log of a call that scored `count` completions."""
    match value:
        case {"columns": dict() as columns, "metrics": dict() as metrics, "problems": list() as problems}:
            cells_valid = all(
                isinstance(cells, list) and len(cells) == count and all(map(_is_cell, cells))
                for cells in columns.values()
            )
            numbers_valid = all(type(number) is float and math.isfinite(number) for number in metrics.values())
            return cells_valid and numbers_valid and all(type(problem) is str for problem in problems)
    return False


def _is_cell(value: Any) -> bool:
    return type(value) in (str, int, bool, type(None)) or (type(value) is float and math.isfinite(value))
