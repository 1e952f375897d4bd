"""The JSON lines of a run's files as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

EVALUATION = "eval/"  # prefix of the metrics of an evaluation in metrics.jsonl
OF_EVERY_LINE = ("step", "wall_time")


def table(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return rows as a `pandas.DataFrame`. A column that a row lacks is NaN there."""
    import pandas

    return pandas.DataFrame(list(rows))


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl belongs to an evaluation, not to a step."""
    names = [name for name in row if name not in OF_EVERY_LINE]
    return bool(names) and all(name.startswith(EVALUATION) for name in names)


def flat_rewards(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of completions.jsonl with one column `rewards/NAME` per reward function."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        nested = name == "rewards" and isinstance(value, dict)
        flat |= {f"rewards/{function}": reward for function, reward in value.items()} if nested else {name: value}
    return flat
