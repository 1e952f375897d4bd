"""Covering sets: few rows in which every combination of so many axis values occurs that can occur at all (combinatorial testing; the greedy
construction of Cohen et al. 1997, "The AETG system", with rules)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
Rule = tuple[tuple[str, ...], Callable[..., bool]]  # axes, and whether their values may meet


def covering_rows(axes: Axes, rules: Sequence[Rule], strength: int = 2) -> list[Row]:
    """Rows, in a fixed order, that obey every rule and hold every possible combination of values of `strength` axes."""
    left = dict.fromkeys(possible(axes, rules, strength))  # in place of a set: its order is fixed
    rows = []
    while left:
        row = dict(next(iter(left)))
        while missing := [axis for axis in axes if axis not in row]:
            row |= max(_extensions(axes, rules, row, missing), key=lambda more: _gain(left, row, more, strength))
        rows.append({axis: row[axis] for axis in axes})
        for combination in occurring(rows[-1], strength):
            left.pop(combination, None)
    return rows


def possible(axes: Axes, rules: Sequence[Rule], strength: int) -> Iterator[frozenset]:
    """Every combination of `strength` values that some row which obeys the rules holds."""
    for chosen in combinations(axes, strength):
        for values in product(*(axes[axis] for axis in chosen)):
            if can_complete(axes, rules, dict(zip(chosen, values, strict=True))):
                yield frozenset(zip(chosen, values, strict=True))


def occurring(row: Row, strength: int) -> Iterator[frozenset]:
    """The combinations that a row holds."""
    return map(frozenset, combinations(row.items(), strength))


def can_complete(axes: Axes, rules: Sequence[Rule], row: Row) -> bool:
    """Whether values for the other axes exist with which the row obeys the rules."""
    if not _obeys(rules, row):
        return False
    axis = next((axis for axis in axes if axis not in row and any(axis in used for used, _ in rules)), None)
    return axis is None or any(can_complete(axes, rules, row | {axis: value}) for value in axes[axis])


def _obeys(rules: Sequence[Rule], row: Row) -> bool:
    return all(allowed(*(row[axis] for axis in used)) for used, allowed in rules if all(axis in row for axis in used))


def _extensions(axes: Axes, rules: Sequence[Rule], row: Row, missing: list[str]) -> list[Row]:
    return [{axis: value} for axis in missing for value in axes[axis] if can_complete(axes, rules, row | {axis: value})]


def _gain(left: dict[frozenset, None], row: Row, more: Row, strength: int) -> int:
    """How many combinations that are still missing the row gets with one more value."""
    return sum(frozenset((*others, *more.items())) in left for others in combinations(row.items(), strength - 1))
