"""The optimizer and the schedule of docs/optimizers.md: their formula, every layout, and a run that resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from suites import usual
from test_compact_moments import _train
from tiny_policy import Case, tiny_model, tiny_run

from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.shrink import random_samples, random_tensor
from megagrpo.proof.verify.verified_step import Outcome, fill_weights, take_step
from megagrpo.proof.verify.verify_compare import compare

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
RATE, DECAY = 1e-2, 0.1


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """The code on the page, as a file."""
    path = tmp_path_factory.mktemp("own") / "my_optimizer.py"
    path.write_text(PAGE.read_text().partition("```python\n")[2].partition("```")[0])
    return path


def config(file: Path, parallel: dict, **options):
    train = dict(optimizer=f"{file}:Lion", distributed_optimizer=False, max_grad_norm=0.0, weight_decay=DECAY)
    made = tiny_run(parallel, train=train | dict(share_prompts=False) | options, algorithm=dict(beta=0.0))
    return made.model_copy(update=dict(train=made.train.model_copy(update=dict(learning_rate=RATE) | options)))


def step(file: Path, case: Case, model: str) -> Outcome:
    return run_ranks(take_step, case.ranks, config(file, case.parallel), tiny_model(model), random_samples())[0]


def before(name: str, shape: tuple) -> torch.Tensor:
    tensor = random_tensor(name, shape, 0.8)
    return tensor + 0.02 * torch.sin(40 * tensor)


def test_the_first_step_follows_the_formula(file):
    """The first mean is 0, so the direction is the sign of the gradient. Norms do not decay."""
    one = step(file, Case("one process", 1, {}), "qwen3_untied")
    for name, gradient in one.gradients.items():
        start = before(name, tuple(gradient.shape))
        decay = DECAY if gradient.dim() > 1 else 0.0
        expected = start * (1 - RATE * decay) - RATE * gradient.sign()
        torch.testing.assert_close(one.weights[name], expected, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("case", "model"),
    usual(
        [
            (Case("tp2_sp", 2, dict(tp=2, sequence_parallel=True)), "qwen3_untied"),
            (Case("pp2_dp2", 4, dict(pp=2)), "qwen3_untied"),
            (Case("ep2", 2, dict(ep=2)), "qwen3_moe"),
        ],
        0,
    ),
    ids=str,
)
def test_the_step_is_the_same_in_every_layout(file, case, model):
    """A sign may differ where the gradient is 0 within rounding, so weights are compared where it is not."""
    one, found = step(file, Case("one process", 1, {}), model), step(file, case, model)
    assert [d for d in compare(found, one) if not d.passed and "weight" not in str(d)] == []
    assert found.disagreement == 0
    for name, gradient in one.gradients.items():
        clear = gradient.abs() > 1e-4 * gradient.abs().max()
        assert clear.float().mean() > 0.5
        torch.testing.assert_close(found.weights[name][clear], one.weights[name][clear], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("precision", usual(["fp32", "bf16"]))
def test_a_run_that_stops_and_goes_on_has_the_same_weights(file, precision, tmp_path):
    def settings(**options):
        made = config(file, dict(tp=2), **options)
        return made.model_copy(update=dict(model=made.model.model_copy(update=dict(precision=precision))))

    whole = run_ranks(_train, 2, tmp_path, settings(), 3, None)[0][0]
    resumed = run_ranks(_train, 2, tmp_path, settings(), 3, 1)[0][0]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    other = run_ranks(_train, 2, tmp_path, settings(optimizer_args=dict(beta=0.1)), 3, None)[0][0]
    assert any(not torch.equal(other[name], tensor) for name, tensor in whole.items())


def rates(settings) -> list[float]:
    layout, hf_config = init_layout(settings.parallel), tiny_model("llama_tied")
    policy = MegatronPolicy(settings, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    found = []
    for _ in range(3):
        policy.scheduler.step(1)
        found += {group["lr"] for group in policy.optimizer.param_groups}
    layout.close()
    return found


def test_each_step_has_the_rate_of_the_schedule(file):
    (found,) = run_ranks(rates, 1, config(file, {}, lr_scheduler_type=f"{file}:warm_then_root"))
    assert found == pytest.approx([RATE * step / 10 for step in (1, 2, 3)])
