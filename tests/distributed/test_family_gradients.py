"""A step of families that layout options do not distinguish equals one process's step, in layouts that cut every
dimension. `test_options_by_layouts.py` tests other families with every pair of options."""

import pytest
from family_steps import DENSE, FIRST, adapter_error, fp8_rounding, layouts_of, step_error
from layouts import name
from tiny_policy import MORE_SHAPES, RELEASED

CASES = [(model, DENSE[0]) for model in ("phi3", "gemma3")]  # fused projections, norms of outputs
OTHERS = [(model, layout) for model in MORE_SHAPES for layout in DENSE if (model, layout) not in CASES]
OTHERS += [(model, layout) for model in RELEASED for layout in layouts_of(model)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*case, id=name(FIRST | dict(model=case[0]) | case[1]), marks=marks)
        for cases, marks in ((CASES[:1], []), ([*CASES[1:], *OTHERS], [pytest.mark.full]))
        for case in cases
    ],
)
def test_a_step_of_another_family_equals_that_of_one_process(model, layout):
    assert step_error(model, layout) <= 1


@pytest.mark.full
@pytest.mark.parametrize("model", ["phi3", "gemma2", "mixtral", *RELEASED])
def test_so_does_a_step_of_its_adapters(model):
    assert adapter_error(model) <= 1


@pytest.mark.full
@pytest.mark.parametrize("model", RELEASED)
def test_and_a_step_in_fp8_within_its_rounding(model):
    assert (rounding := fp8_rounding(model)) is None or rounding > 0
