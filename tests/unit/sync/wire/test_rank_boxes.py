"""The boxes that ranks hold and workers want, and their JSON form in the store."""

import json
import random

from megagrpo.families.shared.boxes import cut
from megagrpo.sync.wire.rank_boxes import RankBoxes, boxes_of_json, by_tensor, wanted_by
from megagrpo.sync.wire.store_messages import DirectRequest, content_key
from tests.unit.for_each import for_each

ROWS = {name: [cut((8, 6), 0, 2 * part, 2 * part + 2) for part in range(4)] for name in ("a", "b", "c")}


def test_the_boxes_of_all_ranks_come_back_from_text_as_they_were():
    rank_boxes = RankBoxes(
        {"w": ((4, 6), {((0, 0), (2, 6)): [0, 2], ((2, 0), (4, 6)): [1]}), "scalar": ((), {((), ()): [0]})}
    )
    assert RankBoxes.unpacked(rank_boxes.packed()).tensors == rank_boxes.tensors
    sources = {(0, 2): {(5, 3): 2}, (1,): {(6, -1): 1, (7, 2): 1}}
    assert rank_boxes.sources(rank_boxes.choices(sources)) == sources
    index = rank_boxes.index(7, "bfloat16")
    assert index.num_bytes == 50 and [block.rank for block in index.tensors["w"].blocks] == [0, 1]


def test_a_workers_boxes_come_back_from_json_by_tensor_and_sorted():
    boxes = [("b", ROWS["b"][1]), ("a", ROWS["a"][3]), ("b", ROWS["b"][0])]
    received = boxes_of_json(json.loads(json.dumps(by_tensor(boxes))))
    assert list(received.items()) == [("a", [ROWS["a"][3]]), ("b", ROWS["b"][:2])]


@for_each("seed", range(10))
def test_every_box_lists_the_workers_that_want_it_in_order(seed):
    dice = random.Random(seed)
    boxes_of = [
        {name: dice.sample(rows, dice.randint(1, 4)) for name, rows in ROWS.items() if dice.random() < 0.7}
        for _ in range(3)
    ]
    wanted = wanted_by(dict(enumerate(boxes_of)), ROWS)
    for name, rows in ROWS.items():
        for box in rows:
            workers = [worker for worker in range(3) if box in boxes_of[worker].get(name, [])]
            assert wanted.get(name, {}).get(box, ()) == tuple(workers)
        assert list(wanted.get(name, {})) == sorted(wanted.get(name, {}))
        alone = {worker: wanted_by({worker: boxes_of[worker]}, [name]).get(name, {}) for worker in range(3)}
        for worker, boxes in alone.items():  # a part of the workers has the same order
            assert list(boxes) == [box for box, workers in wanted.get(name, {}).items() if worker in workers]
    assert list(wanted) == [name for name in ROWS if any(name in boxes for boxes in boxes_of)]


def test_equal_messages_have_the_same_key_and_others_have_another():
    assert content_key("boxes", {"a": [1, 2]}) == content_key("boxes", {"a": [1, 2]})
    assert (
        len(
            {
                content_key("boxes", {"a": [1, 2]}),
                content_key("boxes", {"a": [2, 1]}),
                content_key("rank_boxes", {"a": [1, 2]}),
            }
        )
        == 3
    )


def test_the_text_of_a_request_does_not_hold_the_secret():
    request = DirectRequest("host", 1, "hidden", 1, "cpu", "float32", limit=1, ranks=1)
    assert "host" in str(request) and "hidden" not in str(request)
