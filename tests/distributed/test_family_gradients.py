"""A step of families that layout options do not distinguish equals one process's step, in layouts that cut every
dimension. `test_gradient_parity.py` tests the other families with every pair of options."""

import pytest
from layouts import AXES, config_of, name, ranks
from ranks import run_ranks
from tiny_policy import MORE_SHAPES, tiny_model

from megagrpo.proof.verify.shrink import plainly, random_samples
from megagrpo.proof.verify.verified_step import take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors

FIRST = {axis: values[0] for axis, values in AXES.items()}
LAYOUTS = [
    dict(tp=2, pp=2, sequence_parallel=True, share_prompts=True, loss="dapo"),
    pytest.param(dict(pp=2, vpp=2, cp=2, distributed_optimizer=True, recompute="full"), marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: name(FIRST | layout).partition("-")[2])
@pytest.mark.parametrize("model", MORE_SHAPES)
def test_a_step_of_another_family_equals_that_of_one_process(model, layout):
    row = FIRST | dict(model=model) | layout
    samples = random_samples()
    (expected,) = run_ranks(take_step, 1, plainly(config_of(row)), tiny_model(model), samples)
    assert silent_tensors(expected) == []
    found = run_ranks(take_step, ranks(row), config_of(row), tiny_model(model), samples)[0]
    assert [d for d in compare(found, expected) if not d.passed] == []
    assert found.disagreement == 0
