"""The layouts under test contain every allowed pair of options."""

from itertools import combinations, product

import pytest
from covering import covering_rows
from layouts import AXES, RULES, config_of, covering_layouts, name, ranks
from tiny_policy import tiny_model

from megagrpo.families.hf_config import model_problems


def obeying(axes, rules):
    """Every row that obeys the rules, by brute force."""
    rows = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [row for row in rows if all(allowed(*(row[axis] for axis in used)) for used, allowed in rules)]


def possible(strength):
    """Every allowed combination of values of the axes. Axes without rules combine with everything."""
    ruled = {axis: values for axis, values in AXES.items() if any(axis in used for used, _ in RULES)}
    rows = obeying(ruled, RULES)
    for chosen in combinations(AXES, strength):
        bound, free = [axis for axis in chosen if axis in ruled], [axis for axis in chosen if axis not in ruled]
        for values in product(
            {tuple(row[axis] for axis in bound) for row in rows}, product(*(AXES[axis] for axis in free))
        ):
            yield frozenset(zip(bound + free, values[0] + values[1], strict=True))


def held(rows, strength):
    return {frozenset(some) for row in rows for some in combinations(row.items(), strength)}


def test_every_pair_of_options_that_can_meet_is_tested():
    rows = covering_layouts()
    assert held(rows, 2) == set(possible(2))
    assert len(rows) < 60 and sum(map(ranks, rows)) < sum(map(ranks, covering_rows(AXES, RULES)))


@pytest.mark.full
def test_three_options_meet_in_the_large_matrix():
    assert held(covering_layouts(3), 3) == set(possible(3))


def test_rows_differ_in_name_are_always_the_same_and_can_be_run():
    rows = covering_layouts()
    assert rows == covering_layouts() and len({name(row) for row in rows}) == len(rows)
    for row in rows:
        assert ranks(row) == config_of(row).parallel.model_parallel_size * row["dp"] <= 8
        assert model_problems(tiny_model(row["model"]), config_of(row).parallel) == []


def test_a_small_set_by_hand():
    axes = dict(a=[0, 1], b=[0, 1], c=[0, 1])
    rows = covering_rows(axes, [(("a", "b"), lambda a, b: not (a and b))])
    assert held(rows, 2) == held([row for row in obeying(axes, []) if not (row["a"] and row["b"])], 2)
    assert len(rows) == 5
