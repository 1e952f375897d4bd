"""Our FP8 weights after two steps equal Transformer Engine's, as recorded (te_weights.py), over ranks and for
experts."""

import json

import pytest
from ranks import run_ranks
from te_weights import CASES, FILE, in_steps, name_of

RECORDED = json.loads(FILE.read_text())["steps"]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_steps_make_of_our_weights_what_they_make_of_transformer_engines(case):
    expected = RECORDED[name_of(case)]
    # every step changes every weight
    assert len({crc for step in expected for crc in step}) == sum(map(len, expected)) > 0
    for found in run_ranks(in_steps, case[-1], case):
        assert found == expected
