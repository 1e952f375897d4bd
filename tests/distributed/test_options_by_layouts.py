"""A step with options in a layout equals one process's step: every two options, every two sizes of a layout, and every
option with every size meet in a row (`option_rows.py`). The default suite has rows in which each option and each size
occurs. Beside it each option has a file with its own oracle."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from covering import allowed_combinations
from option_rows import AXES, FP8_AXES, IMAGES, RULES, Inputs, Steps, few_rows, fp8_rows, name, rows
from ranks import run_ranks
from suites import usual

from megagrpo.families.hf_config import load_hf_config
from megagrpo.train_types import TrainSample

FEW_PARTS, PARTS = 2, 8  # tests of the rows; one test of all would be long


def _with_images(folder: Path) -> list[TrainSample]:
    """The samples with images of a new model in `folder`."""
    from test_images import samples_of
    from tiny_vision import write_model

    write_model(folder, kind=IMAGES, num_hidden_layers=4, intermediate_size=256)
    generator = torch.Generator().manual_seed(2)

    def drawn(sample: TrainSample) -> torch.Tensor:
        """Rollout log-probs that identify tokens, as those of `random_samples`."""
        noise = torch.randn(sample.token_ids.numel(), generator=generator)
        return torch.where(sample.response_mask, -4.5 + 0.1 * noise, 0.0)

    return [replace(sample, rollout_logprobs=drawn(sample)) for sample in samples_of(folder)]


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Steps:
    folder = tmp_path_factory.mktemp("images") / "model"
    (samples,) = run_ranks(_with_images, 1, folder)
    return Steps(Inputs(folder, load_hf_config(folder), samples))


@pytest.mark.parametrize(("axes", "of"), [(AXES, rows), (FP8_AXES, fp8_rows)], ids=["options", "fp8"])
def test_every_two_values_that_a_run_can_have_meet_in_a_row(axes, of):
    held = {frozenset(pair) for row in of() for pair in combinations(row.items(), 2)}
    assert set(allowed_combinations(axes, RULES)) == held


def problems(steps: Steps, some) -> dict[str, list[str]]:
    """The problems of each row that has any, errors of its ranks included."""
    found = {}
    for row in some:
        try:
            wrong = steps.problems(row)
        except (RuntimeError, ValueError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            found[name(row)] = wrong
    return found


def test_each_value_occurs_in_a_row_of_the_default_suite():
    held, every = ({pair for row in some for pair in row.items()} for some in (few_rows(), rows()))
    assert held == every and len(few_rows()) < len(rows()) / 4


@pytest.mark.parametrize("part", range(FEW_PARTS))
def test_a_step_equals_that_of_one_process(part, steps):
    assert problems(steps, few_rows()[part::FEW_PARTS]) == {}


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_a_step_of_any_other_two_options_equals_that_of_one_process(part, steps):
    assert problems(steps, [row for row in rows() if row not in few_rows()][part::PARTS]) == {}


@pytest.mark.parametrize("part", usual(range(5), 0))
def test_a_step_in_fp8_is_that_of_one_process_within_its_own_rounding(part, steps):
    assert problems(steps, fp8_rows()[part::5]) == {}
