"""A custom loss in whole optimizer steps: bit-identical to the built-in loss that it repeats, and the audit's report on
it."""

import re
from pathlib import Path

import pytest
import torch
from dumped_steps import FUNCTIONS, dump_step, make_model
from ranks import run_ranks
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.platform.parallel.layout import init_layout
from megagrpo.proof.audit.audit_checks import check_step
from megagrpo.proof.audit.saved import load_step
from megagrpo.proof.verify.verified_step import take_step

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
CLIP_RATIOS = {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> str:
    """The page's loss, as `loss_type` names it."""
    file = tmp_path_factory.mktemp("own") / "my_loss.py"
    file.write_text(
        next(
            block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def clipped" in block
        )
    )
    return f"{file}:clipped"


def _steps(losses):
    """The result of one step of each loss, with samples of advantage 0 computed."""
    algorithm = dict(beta=0.1, skip_zero_advantage=False)
    configs = [tiny_run({}, algorithm=algorithm | loss, train=dict(distributed_optimizer=True)) for loss in losses]
    return [take_step(config, tiny_model("llama_tied"), few_samples()) for config in configs]


@pytest.mark.parametrize("built_in", [dict(loss_type="dapo", loss_average=None)])
def test_a_step_has_the_bits_of_the_built_in_loss_on_two_ranks(own, built_in):
    found, expected = run_ranks(_steps, 2, [dict(loss_type=own), built_in])[0]
    assert expected.metrics.keys() - found.metrics.keys() == CLIP_RATIOS
    assert found.metrics == {name: value for name, value in expected.metrics.items() if name not in CLIP_RATIOS}
    assert found.metrics["loss"] != 0 and found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    assert all(torch.equal(found.gradients[name], gradient) for name, gradient in expected.gradients.items())


def _dump(root, loss_type):
    config = tiny_run(
        algorithm=dict(loss_type=loss_type, loss_average="sequence_means", beta=0.0, num_iterations=2),
        debug=dict(dump_steps=[1]),
        rewards=dict(functions=FUNCTIONS),
        model=dict(tokenizer="/nowhere"),
    )
    dump_step(config, init_layout(config.parallel), root / "model", root / "run")


def _audit(root):
    return list(check_step(load_step(root / "run", 1)))


@pytest.mark.full
def test_the_audit_runs_the_loss_again_in_float64_and_says_that_it_checks_no_formula(own, tmp_path):
    run_ranks(make_model, 1, tmp_path / "model", tiny_model("llama_tied"))
    run_ranks(_dump, 2, tmp_path, own)
    (checks,) = run_ranks(_audit, 1, tmp_path)
    assert [check for check in checks if not check.passed] == []
    notes = {check.quantity: check.note for check in checks}
    said = f"{own} run again in float64; its formula is not checked"
    assert [note for quantity, note in notes.items() if quantity.startswith("loss,")] == [said, said]
