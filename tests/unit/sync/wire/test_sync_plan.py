"""The plan of a whole sync: every worker gets each element it wants once, from a rank that holds it. Replicas share the
work; messages are few."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megagrpo.families.shared.boxes import cut, intersect, size, whole
from megagrpo.weights.slices.sync_plan import SMALL, layer_of, plan_transfers
from tests.unit.for_each import for_each


def cuts_of(rng, shape, ranks):
    """Box -> ranks: a tensor cut along one dimension into parts of any size, each part held by some of the ranks."""
    dim = rng.randrange(len(shape))
    parts = rng.randrange(1, min(4, shape[dim]) + 1)
    edges = [0, *sorted(rng.sample(range(1, shape[dim]), parts - 1)), shape[dim]]
    return {
        cut(shape, dim, a, b): sorted(rng.sample(range(ranks), rng.randrange(1, ranks + 1))) for a, b in pairwise(edges)
    }


def random_boxes(rng):
    shapes = {
        f"model.layers.{i % 3}.w{i}": tuple(rng.randrange(1, 9) for _ in range(rng.choice([1, 2, 3])))
        for i in range(12)
    }
    held = {name: cuts_of(rng, shape, 5) for name, shape in shapes.items()}
    wanted = {name: cuts_of(rng, shape, 4) for name, shape in shapes.items()}
    return shapes, held, wanted


@for_each("seed", range(40))
def test_every_element_that_a_worker_wants_comes_once_from_a_rank_that_holds_it(seed):
    shapes, held, wanted = random_boxes(random.Random(seed))
    made = plan_transfers(held, wanted)
    painted = {(name, worker): np.zeros(shape, int) for name, shape in shapes.items() for worker in range(4)}
    for tensor, box, source, worker, count in zip(
        made.tensor, made.box, made.source, made.destination, made.elements, strict=True
    ):
        name, part = made.names[tensor], made.boxes[box]
        assert any(source in ranks and intersect(part, block) == part for block, ranks in held[name].items())
        assert size(part) == count
        painted[name, worker][tuple(slice(a, b) for a, b in zip(*part, strict=True))] += 1
    for name, shape in shapes.items():
        for worker in range(4):
            expected = np.zeros(shape, int)
            for box, workers in wanted[name].items():
                if worker in workers:
                    expected[tuple(slice(a, b) for a, b in zip(*box, strict=True))] = 1
            np.testing.assert_array_equal(painted[name, worker], expected)
    needs = sum(size(box) * len(workers) for boxes in wanted.values() for box, workers in boxes.items())
    assert made.total == needs == made.sent(5).sum() == made.received(4).sum() == sum(made.links().values())
    assert plan_transfers(held, wanted).source.tolist() == made.source.tolist()


def test_the_same_layout_on_both_sides_moves_each_byte_once_and_whole():
    rows = {
        f"model.layers.{layer}.w": {cut((8, 6), 0, 2 * rank, 2 * rank + 2): [rank] for rank in range(4)}
        for layer in range(3)
    }
    made = plan_transfers(rows, rows)
    assert (made.source == made.destination).all() and len(made.source) == 12 and made.total == 3 * 48


def test_replicas_share_what_only_they_hold():
    held = {f"model.layers.{layer}.w": {whole((SMALL, 2)): [0, 1, 2, 3]} for layer in range(8)}
    wanted = {name: {whole((SMALL, 2)): [0, 1]} for name in held}
    assert plan_transfers(held, wanted).sent(4).tolist() == [8 * SMALL] * 4


def test_a_rank_that_must_send_anyway_leaves_what_others_can_send_to_them():
    held = {"model.layers.0.expert": {whole((SMALL, 8)): [0]}, "model.layers.0.dense": {whole((SMALL, 4)): [0, 1]}}
    wanted = {name: {box: [0] for box in boxes} for name, boxes in held.items()}
    assert plan_transfers(held, wanted).sent(2).tolist() == [8 * SMALL, 4 * SMALL]


def test_small_tensors_join_a_message_that_goes_anyway():
    shape = (SMALL, 4)
    held = {f"model.layers.{layer}.{kind}": {} for layer in range(4) for kind in ("w", "norm")}
    for name, boxes in held.items():
        boxes |= {whole((64,)): [0, 1, 2, 3]} if "norm" in name else {cut(shape, 0, 0, SMALL): [1]}
    wanted = {name: {box: [0, 1] for box in boxes} for name, boxes in held.items()}
    made = plan_transfers(held, wanted)
    sources, workers, elements = made.messages
    assert Counter(zip(sources.tolist(), workers.tolist(), strict=True)) == {(1, 0): 4, (1, 1): 4}
    assert elements.tolist() == [4 * SMALL + 64] * 8


def test_a_tensor_that_no_rank_has_is_named():
    held = {"model.layers.0.w": {cut((8, 3), 0, 0, 4): [0]}}
    with pytest.raises(LookupError, match=r"model\.layers\.0\.w: no rank holds \[4:8, 0:3\]"):
        plan_transfers(held, {"model.layers.0.w": {whole((8, 3)): [0]}})
    with pytest.raises(LookupError, match=r"lm_head\.weight: no rank holds"):
        plan_transfers(held, {"lm_head.weight": {whole((8, 3)): [0]}})


def test_a_layer_is_read_from_the_first_number_in_a_name():
    assert [layer_of(name) for name in ("model.layers.12.mlp.experts.3.w1.weight", "lm_head.weight")] == [12, -1]
