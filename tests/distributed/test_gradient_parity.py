"""Loss, log-probs, metrics, every gradient tensor and the next weights of a layout equal one process's."""

import functools

import pytest
from layouts import AXES, config_of, covering_layouts, name, ranks
from ranks import run_ranks
from tiny_policy import tiny_model

from megagrpo.proof.verify.shrink import plainly, random_samples
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors

PAIRS = covering_layouts()
# two groups: two truncated responses, an advantage of 0, foreign tokens
SAMPLES = [*random_samples()[:3], *random_samples()[6:9]]


def pytest_generate_tests(metafunc):
    """One test contains each pair of options. `make test-full` covers every three options, which takes a while to
    compute."""
    if "row" in metafunc.fixturenames:
        more = (
            []
            if metafunc.config.option.markexpr == "not full"
            else [row for row in covering_layouts(strength=3) if row not in PAIRS]
        )
        metafunc.parametrize("row", [*PAIRS, *(pytest.param(row, marks=pytest.mark.full) for row in more)], ids=name)


@functools.cache
def one_process(model: str, loss: str) -> Outcome:
    first = {axis: values[0] for axis, values in AXES.items()}
    config = plainly(config_of(first | dict(model=model, loss=loss)))
    (outcome,) = run_ranks(take_step, 1, config, tiny_model(model), SAMPLES)
    assert silent_tensors(outcome) == []
    return outcome


def test_a_step_equals_that_of_one_process(row):
    found = run_ranks(take_step, ranks(row), config_of(row), tiny_model(row["model"]), SAMPLES)[0]
    assert [d for d in compare(found, one_process(row["model"], row["loss"])) if not d.passed] == []
    assert found.disagreement == 0
