"""Covering sets (combinatorial testing): few rows that contain every allowed combination of values of a few axes. Uses
the greedy construction of Cohen et al. 1997, "The AETG system", with rules."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
Rule = tuple[tuple[str, ...], Callable[..., bool]]  # axes, and whether these values are allowed together


def covering_rows(axes: Axes, rules: Sequence[Rule], strength: int = 2) -> list[Row]:
    """Rows, in a fixed order, that obey every rule and contain every allowed combination of values of `strength`
    axes."""
    can_complete = _completer(axes, rules)
    left = dict.fromkeys(  # used as a set with a fixed order
        frozenset(zip(chosen, values, strict=True))
        for chosen in combinations(axes, strength)
        for values in product(*(axes[axis] for axis in chosen))
        if can_complete(dict(zip(chosen, values, strict=True)))
    )
    rows = []
    while left:
        row = dict(next(iter(left)))
        while missing := [axis for axis in axes if axis not in row]:
            choices = [(axis, value) for axis in missing for value in axes[axis]]
            by_gain = sorted(choices, key=lambda choice: -_gain(left, row, choice, strength))
            row |= [next(choice for choice in by_gain if can_complete(row | dict([choice])))]
        rows.append({axis: row[axis] for axis in axes})
        for combination in combinations(rows[-1].items(), strength):
            left.pop(frozenset(combination), None)
    return rows


def cheaper(
    rows: Sequence[Row], axes: Axes, rules: Sequence[Rule], cost: Callable[[Row], float], strength: int = 2
) -> list[Row]:
    """Rows with the same combinations at less cost: drops redundant rows, and takes a cheaper value where no
    combination is lost."""

    def held_by(row: Row) -> set[frozenset]:
        return {frozenset(some) for some in combinations(row.items(), strength)}

    can_complete = _completer(axes, rules)
    held = Counter(some for row in rows for some in held_by(row))
    rows = [dict(row) for row in rows]
    before = None
    while rows != before:
        before = [dict(row) for row in rows]
        for row in sorted(rows, key=cost, reverse=True):
            changed = [row | {axis: value} for axis in axes for value in axes[axis]]
            for other in [{}, *sorted((other for other in changed if cost(other) < cost(row)), key=cost)]:
                if can_complete(other) and all(held[some] > 1 for some in held_by(row) - held_by(other)):
                    held.subtract(held_by(row))
                    held.update(held_by(other))
                    row.clear()
                    row.update(other)
                    break
        rows = [row for row in rows if row]
    return rows


def _gain(left: dict[frozenset, None], row: Row, choice: tuple[str, Any], strength: int) -> int:
    """The number of missing combinations that the row gains with one more value."""
    return sum(frozenset((*others, choice)) in left for others in combinations(row.items(), strength - 1))


def _completer(axes: Axes, rules: Sequence[Rule]) -> Callable[[Row], bool]:
    """Whether the other axes have values with which a row obeys the rules."""
    ruled = [axis for axis in axes if any(axis in used for used, _ in rules)]

    @functools.cache
    def search(items: frozenset) -> bool:
        row = dict(items)
        if not all(allowed(*(row[axis] for axis in used)) for used, allowed in rules if row.keys() >= set(used)):
            return False
        axis = next((axis for axis in ruled if axis not in row), None)
        return axis is None or any(search(items | {(axis, value)}) for value in axes[axis])

    return lambda row: search(frozenset((axis, row[axis]) for axis in ruled if axis in row))
