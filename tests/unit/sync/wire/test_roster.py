"""The roster: blocks that ranks hold and workers want, sent through a board of notes."""

import json
import random

import pytest

from megagrpo.models.families.boxes import cut
from megagrpo.sync.wire.notes import DirectRequest, content_key
from megagrpo.sync.wire.roster import Roster, boxes_of_json, by_tensor, wanted_by

ROWS = {name: [cut((8, 6), 0, 2 * part, 2 * part + 2) for part in range(4)] for name in ("a", "b", "c")}


def test_a_roster_comes_back_from_json_as_it_was():
    roster = Roster({"w": ((4, 6), {((0, 0), (2, 6)): [0, 2], ((2, 0), (4, 6)): [1]}), "scalar": ((), {((), ()): [0]})})
    assert Roster.of_json(json.loads(json.dumps(roster.as_json()))).tensors == roster.tensors
    manifest = roster.manifest(7, "bfloat16")
    assert manifest.num_bytes == 50 and [block.rank for block in manifest.tensors["w"].blocks] == [0, 1]


def test_a_workers_boxes_come_back_from_json_by_tensor_and_sorted():
    boxes = [("b", ROWS["b"][1]), ("a", ROWS["a"][3]), ("b", ROWS["b"][0])]
    received = boxes_of_json(json.loads(json.dumps(by_tensor(boxes))))
    assert list(received.items()) == [("a", [ROWS["a"][3]]), ("b", ROWS["b"][:2])]


@pytest.mark.parametrize("seed", range(10))
def test_every_box_lists_the_workers_that_want_it_in_order(seed):
    dice = random.Random(seed)
    boxes_of = [
        {name: dice.sample(rows, dice.randint(1, 4)) for name, rows in ROWS.items() if dice.random() < 0.7}
        for _ in range(3)
    ]
    wanted = wanted_by(boxes_of, ROWS)
    for name, rows in ROWS.items():
        for box in rows:
            workers = [worker for worker in range(3) if box in boxes_of[worker].get(name, [])]
            assert wanted.get(name, {}).get(box, []) == workers
    assert list(wanted) == [name for name in ROWS if any(name in boxes for boxes in boxes_of)]


def test_equal_notes_have_the_same_key_and_others_have_another():
    assert content_key("boxes", {"a": [1, 2]}) == content_key("boxes", {"a": [1, 2]})
    assert (
        len(
            {
                content_key("boxes", {"a": [1, 2]}),
                content_key("boxes", {"a": [2, 1]}),
                content_key("roster", {"a": [1, 2]}),
            }
        )
        == 3
    )


def test_the_text_of_a_request_does_not_hold_the_secret():
    request = DirectRequest(
        "host", 1, "hidden", "roster", "update1", "cpu", "float32", limit=1, ranks=1, first_worker=0, seconds=1.0
    )
    assert "host" in str(request) and "hidden" not in str(request)
