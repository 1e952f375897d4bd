import pytest

from megagrpo.data.packing.sample_packing import slices


def indices(count, parts, seed):
    return [part.tolist() for part in slices(count, parts, seed)]


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_each_sample_is_in_one_of_equally_many_parts_in_the_order_it_had(count):
    parts = indices(12, count, seed=1)
    assert [len(part) for part in parts] == [12 // count] * count
    assert sorted(i for part in parts for i in part) == list(range(12)) and parts == [sorted(part) for part in parts]


def test_parts_mix_groups_by_the_seed_and_nothing_else():
    first = indices(64, 4, seed=1)
    assert indices(64, 4, seed=1) == first != indices(64, 4, seed=2)
    assert all(len({i // 8 for i in part}) > 4 for part in first)  # groups of 8


def test_one_part_is_everything():
    assert indices(5, 1, seed=3) == [[0, 1, 2, 3, 4]]


def test_what_does_not_divide_differs_by_one_and_no_part_is_empty():
    assert sorted(len(part) for part in slices(7, 3, seed=1)) == [2, 2, 3]
    assert [len(part) for part in slices(2, 3, seed=1)] == [1, 1]
