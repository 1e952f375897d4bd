"""The loss becomes NaN in the middle of a run: the step is skipped, logged and counted, and the run continues or stops
as configured."""

import dataclasses
import json

import pytest

from megagrpo.trainer import wiring
from tests.e2e import world


def spoil(steps):
    """In the fork of a run: makes the loss NaN in these steps, counted from 1, for a run with one micro-batch per
    step."""
    make_loss, seen = wiring.make_loss, []

    def spoilt(algorithm):
        loss = make_loss(algorithm)

        def with_nan(inputs):
            if not any(inputs.micro_batch is earlier for earlier in seen):
                seen.append(inputs.micro_batch)
            output = loss(inputs)
            return (
                dataclasses.replace(output, numerator=output.numerator * float("nan")) if len(seen) in steps else output
            )

        return with_nan

    wiring.make_loss = spoilt


ONE_MICRO_BATCH = "train.max_tokens_per_micro_batch=4096"


@pytest.mark.full
def test_the_run_goes_on_behind_a_step_without_a_finite_loss(tmp_path):
    options = ["run.max_steps=3", ONE_MICRO_BATCH, "debug.dump_steps=[2]"]
    run = world.train(tmp_path, *options, prepare=lambda: spoil({2}))
    assert run.code == 0, run.err
    warning = (
        "warning: step 2: optimizer step skipped, weights unchanged: NaN or infinity in the gradient of "
        "model.norm.weight on rank 0"
    )
    assert [line for line in run.out.splitlines() if line.startswith("warning")] == [
        f"{warning}; loss nan; skipped in a row 1 of 5 allowed"
    ]
    assert [line["train/skipped_steps"] for line in run.metrics] == [0, 1, 1]
    assert ["grad_norm" in line for line in run.metrics] == [True, False, True] and run.metrics[1]["loss"] is None
    assert [row["step"] for row in run.completions] == [1] * 16 + [2] * 16 + [3] * 16
    # the same weights, pushed again
    assert {row["weight_version"] for row in run.completions if row["step"] == 3} == {3}
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 1 and said.splitlines()[-1].startswith("differs first in loss: the run has nan, float64 has ")
    assert (
        json.loads((run.folder / "dumps" / "step_000002" / "step.json").read_text())["updates"][0]["metrics"]["loss"]
        == "nan"
    )


def test_the_run_stops_when_it_goes_on_like_that(tmp_path):
    run = world.train(
        tmp_path, "run.max_steps=6", ONE_MICRO_BATCH, "train.max_skipped_steps=2", prepare=lambda: spoil(range(2, 99))
    )
    assert run.code == 1 and [line["train/skipped_steps"] for line in run.metrics] == [0, 1, 2]
    assert (
        "rank 0 stops: train.max_skipped_steps: 2 optimizer steps in a row had NaN or infinity; the warnings name"
        in run.err
    )
    assert "Traceback" not in run.err and len(run.completions) == 3 * 16 and run.saved == []
