"""Muon against its formula, in every layout, and from a checkpoint."""

import pytest
import torch
from ranks import run_ranks
from test_compact_moments import _train
from tiny_policy import Case, few_samples, tiny_model, tiny_run

from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.proof.verify.verified_step import Outcome, relative_error, take_step

RATE, DECAY = 1e-2, 0.1
# Coefficients of the five Newton-Schulz steps in the package; modded-nanogpt introduced them.
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def config(parallel: dict, **options):
    train = (
        dict(optimizer="muon", distributed_optimizer=False, max_grad_norm=0.0, weight_decay=DECAY, share_prompts=False)
        | options
    )
    return tiny_run(parallel, train=train, algorithm=dict(beta=0.0))


def step(case: Case, model: str = "qwen3_untied") -> Outcome:
    return run_ranks(take_step, case.ranks, config(case.parallel), tiny_model(model), few_samples())[0]


@pytest.fixture(scope="module")
def one() -> Outcome:
    return step(Case("one process", 1, {}))


def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """The float64 oracle: five steps towards U V^T, where `gradient` is U S V^T."""
    x = gradient.double() / gradient.double().norm()
    for a, b, c in STEPS:
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x


def before(name: str, shape: tuple) -> torch.Tensor:
    tensor = random_tensor(name, shape, 0.8)
    return (tensor + 0.02 * torch.sin(40 * tensor)).double()


def test_the_matrices_of_blocks_follow_the_formula_and_the_rest_adam(one):
    seen = 0
    for name, gradient in one.gradients.items():
        if name.endswith("up_proj.weight"):
            continue  # is fused with the gate
        parts = [name, name.replace("gate_proj", "up_proj")] if "gate_proj" in name else [name]
        start = torch.cat([before(part, tuple(gradient.shape)) for part in parts])
        stepped, gradient = (torch.cat([tensors[part] for part in parts]) for tensors in (one.weights, one.gradients))
        if name.endswith("_proj.weight"):
            change, decay = 0.2 * max(start.shape) ** 0.5 * orthogonal(gradient), DECAY
        else:
            change, decay = gradient / (gradient.abs() + 1e-3), DECAY if gradient.dim() > 1 else 0.0
        expected = start - RATE * (change + decay * start)
        assert relative_error(stepped - start, expected - start) < 2e-3, name  # the difference of float32 weights
        seen += 1
    assert seen == len(one.gradients) - tiny_model("qwen3_untied").num_layers


@pytest.fixture(scope="module")
def one_with_experts() -> Outcome:
    return step(Case("one process", 1, {}), "qwen3_moe")


def test_every_expert_follows_the_formula(one_with_experts):
    """Also the router, which is a matrix."""
    gradients, weights, seen = one_with_experts.gradients, one_with_experts.weights, 0
    for name, gradient in gradients.items():
        if not (name.endswith("down_proj.weight") or name.endswith("mlp.gate.weight")):
            continue
        start = before(name, tuple(gradient.shape))
        change = 0.2 * max(start.shape) ** 0.5 * orthogonal(gradient)
        expected = start - RATE * (change + DECAY * start)
        assert relative_error(weights[name] - start, expected - start) < 2e-3, name
        seen += ".experts." in name
    model = tiny_model("qwen3_moe")
    assert seen == model.mixture.count * len(model.mixture.blocks)


@pytest.mark.full
def test_a_run_that_stops_and_goes_on_has_the_same_weights(tmp_path):
    whole = run_ranks(_train, 2, tmp_path, config(dict(tp=2)), 3, None)[0][0]
    resumed = run_ranks(_train, 2, tmp_path, config(dict(tp=2)), 3, 1)[0][0]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    lighter = run_ranks(_train, 2, tmp_path, config(dict(tp=2), muon_momentum=0.5), 3, None)[0][0]
    matrices = {name for name in whole if name.endswith("_proj.weight")}
    assert {name for name, tensor in whole.items() if not torch.equal(lighter[name], tensor)} >= matrices
