"""The planner of weight sync against a painted array: every element of every box comes from exactly one of its
holders."""

import random

import numpy as np
import pytest

from megagrpo.families.shared.boxes import brackets, cut, extent, intersect, missing, size, subtract, whole
from megagrpo.weights.slices.box_slices import cover, owners
from tests.unit.for_each import for_each


def window(box):
    return tuple(slice(a, b) for a, b in zip(*box, strict=True))


def random_box(rng, shape):
    lo = [rng.randrange(n) for n in shape]
    return tuple(lo), tuple(rng.randrange(a + 1, n + 1) for a, n in zip(lo, shape, strict=True))


def random_tiling(rng, box, depth):
    """Disjoint boxes that tile `box`, cut at random positions."""
    longest = max(range(len(box[0])), key=lambda dim: extent(box)[dim])
    if depth == 0 or extent(box)[longest] < 2:
        return [box]
    at = rng.randrange(box[0][longest] + 1, box[1][longest])
    low = (box[0], tuple(at if d == longest else b for d, b in enumerate(box[1])))
    high = (tuple(at if d == longest else a for d, a in enumerate(box[0])), box[1])
    return random_tiling(rng, low, depth - 1) + random_tiling(rng, high, depth - 1)


@for_each("seed", range(60))
def test_every_element_of_a_box_comes_from_exactly_one_holder(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 12) for _ in range(rng.choice([1, 2, 2, 3])))
    holders = random_tiling(rng, whole(shape), rng.randrange(4))
    holders += rng.choices(holders, k=rng.randrange(3))  # replicas
    holders += [random_box(rng, shape) for _ in range(rng.randrange(3))]  # and holders that overlap others
    rng.shuffle(holders)
    for reader in range(3):
        box = random_box(rng, shape)
        painted = np.zeros(shape, int)
        for index, part in cover(box, holders, reader):
            assert intersect(part, holders[index]) == part
            painted[window(part)] += 1
        expected = np.zeros(shape, int)
        expected[window(box)] = 1
        np.testing.assert_array_equal(painted, expected)


@for_each("seed", range(30))
def test_what_is_missing_is_exactly_what_no_part_covers(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 9) for _ in range(rng.choice([1, 2, 3])))
    parts = [random_box(rng, shape) for _ in range(rng.randrange(5))]
    painted = np.zeros(shape, int)
    for part in parts:
        painted[window(part)] = 1
    for left in missing(whole(shape), parts):
        painted[window(left)] += 1  # a second copy of an element gives 2
    np.testing.assert_array_equal(painted, np.ones(shape, int))


@for_each("seed", range(30))
def test_subtracting_leaves_disjoint_boxes(seed):
    rng = random.Random(seed)
    a, b = random_box(rng, (7, 5, 6)), random_box(rng, (7, 5, 6))
    rest = subtract(a, b)
    assert sum(map(size, rest)) == size(a) - (size(common) if (common := intersect(a, b)) else 0)
    assert not any(intersect(piece, b) for piece in rest)


def test_a_slice_that_no_rank_has_is_named():
    with pytest.raises(LookupError, match=r"\[4:6, 0:3\]"):
        cover(((2, 0), (6, 3)), [cut((8, 3), 0, 0, 4), cut((8, 3), 0, 6, 8)])


def test_readers_spread_over_replicas():
    replicas = [whole((4, 4))] * 3
    assert [cover(whole((4, 4)), replicas, reader)[0][0] for reader in range(6)] == [0, 1, 2, 0, 1, 2]


def test_each_block_has_one_owner_among_its_holders_and_replicas_share_the_work():
    blocks = [(f"layer{i}", 10) for i in range(8)]
    only_first = [("embedding", 40)]
    keys_of = [blocks + only_first, blocks, blocks, blocks]
    owner = owners(keys_of)
    assert set(owner) == {name for name, _ in blocks + only_first}
    assert owner["embedding"] == 0
    loads = [sum(count for name, count in keys_of[rank] if owner[name] == rank) for rank in range(4)]
    assert sum(loads) == 120 and max(loads) == 40 and min(loads[1:]) >= 20


def test_boxes_read_like_python_slices():
    assert brackets(cut((8, 16), 1, 4, 8)) == "[0:8, 4:8]"
