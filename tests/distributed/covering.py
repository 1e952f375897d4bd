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
    left = dict.fromkeys(allowed_combinations(axes, rules, strength))  # used as a set with a fixed order
    rows = []
    while left:
        row = dict(next(iter(left)))
        gains = {(axis, value): 0 for axis in axes for value in axes[axis] if axis not in row}
        added = list(combinations(row.items(), strength - 1))  # combinations that `gains` does not count yet
        while gains:
            for others in added:
                for choice in gains:
                    gains[choice] += frozenset((*others, choice)) in left
            by_gain = sorted(gains, key=lambda choice: -gains[choice])
            axis, value = next(choice for choice in by_gain if can_complete(row | dict([choice])))
            gains = {choice: gain for choice, gain in gains.items() if choice[0] != axis}
            added = [(*others, (axis, value)) for others in combinations(row.items(), strength - 2)]
            row[axis] = value
        rows.append({axis: row[axis] for axis in axes})
        for combination in combinations(rows[-1].items(), strength):
            left.pop(frozenset(combination), None)
    return rows


def allowed_combinations(axes: Axes, rules: Sequence[Rule], strength: int = 2) -> list[frozenset]:
    """All combinations of values of `strength` axes that some row can have, in a fixed order."""
    can_complete = _completer(axes, rules)
    return [
        frozenset(zip(chosen, values, strict=True))
        for chosen in combinations(axes, strength)
        for values in product(*(axes[axis] for axis in chosen))
        if can_complete(dict(zip(chosen, values, strict=True)))
    ]


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


def _completer(axes: Axes, rules: Sequence[Rule]) -> Callable[[Row], bool]:
    """Whether the other axes have values with which a row obeys the rules."""
    rules_of = {axis: [rule for rule in rules if axis in rule[0]] for axis in axes}
    ruled = sorted((axis for axis in axes if rules_of[axis]), key=lambda axis: -len(rules_of[axis]))

    def obeys(row: Row, axis: str) -> bool:
        return all(
            allowed(*(row[other] for other in used)) for used, allowed in rules_of[axis] if row.keys() >= set(used)
        )

    def completes(row: Row, missing: Sequence[str]) -> bool:
        if not missing:
            return True
        axis, *others = missing
        tries = (row | {axis: value} for value in axes[axis])
        return any(obeys(each, axis) and completes(each, others) for each in tries)

    @functools.cache
    def search(items: frozenset) -> bool:
        row = dict(items)
        return all(obeys(row, axis) for axis in row) and completes(row, [axis for axis in ruled if axis not in row])

    return lambda row: search(frozenset((axis, row[axis]) for axis in ruled if axis in row))
