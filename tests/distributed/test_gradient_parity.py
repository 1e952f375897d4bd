"""Loss, log-probs, metrics, every gradient tensor and the next weights of a layout equal one process's, in layouts of up
to eight ranks in which every three options meet. `test_options_by_layouts.py` has every two on up to four ranks."""

import functools

import pytest
from layouts import AXES, config_of, parametrize_rows, ranks
from ranks import run_ranks
from tiny_policy import tiny_model

from megagrpo.proof.verify.shrink import plainly, random_samples
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors

# two groups: two truncated responses, an advantage of 0, foreign tokens
SAMPLES = [*random_samples()[:3], *random_samples()[6:9]]


def pytest_generate_tests(metafunc):
    parametrize_rows(metafunc, strength=3)


@functools.cache
def one_process(model: str, loss: str) -> Outcome:
    first = {axis: values[0] for axis, values in AXES.items()}
    config = plainly(config_of(first | dict(model=model, loss=loss)))
    (outcome,) = run_ranks(take_step, 1, config, tiny_model(model), SAMPLES)
    assert silent_tensors(outcome) == []
    return outcome


@pytest.mark.full
def test_a_step_equals_that_of_one_process(row):
    found = run_ranks(take_step, ranks(row), config_of(row), tiny_model(row["model"]), SAMPLES)[0]
    assert [d for d in compare(found, one_process(row["model"], row["loss"])) if not d.passed] == []
    assert found.disagreement == 0
