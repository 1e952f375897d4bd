"""The number of copies that loaders make of each part of an arriving block."""

from collections import Counter

import pytest

from megagrpo.families.shared.boxes import Box, cut, intersect, size, whole
from megagrpo.sync.vllm_side.p2p_receiver import copies_of_parts

SHAPE = (8, 6)
BLOCKS = {"w": tuple(cut(SHAPE, 0, start, start + 4) for start in (0, 4))}


def elements_of(box: Box) -> list[tuple[int, int]]:
    (top, left), (bottom, right) = box
    return [(row, column) for row in range(top, bottom) for column in range(left, right)]


@pytest.mark.parametrize("limit", [1, 5, 12, 100])
def test_copies_of_parts_add_up_to_the_copies_of_each_element(limit):
    boxes = Counter({("w", whole(SHAPE)): 2, ("w", cut(SHAPE, 0, 3, 6)): 1, ("w", cut(SHAPE, 1, 0, 2)): 3})
    copied, expected = Counter(), Counter()
    for (_, part), times in copies_of_parts(boxes, BLOCKS, limit).items():
        assert size(part) <= limit and any(intersect(part, block) == part for block in BLOCKS["w"])
        for element in elements_of(part):
            copied[element] += times
    for (_, box), times in boxes.items():
        for element in elements_of(box):
            expected[element] += times
    assert copied == expected


def test_a_box_that_no_rank_holds_is_an_error():
    with pytest.raises(LookupError, match=r"no rank holds \[4:8, 0:6\]"):
        copies_of_parts(Counter({("w", whole(SHAPE)): 1}), {"w": BLOCKS["w"][:1]}, 100)
