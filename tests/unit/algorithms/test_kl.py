"""Estimators against the exact KL of small categorical distributions: averages are sums over all tokens, weighted by
probability."""

import math

import pytest
import torch

from megagrpo.algorithms.kl import ESTIMATORS, importance_weighted, low_var, token_kl
from tests.unit.for_each import for_each

VOCAB = 7


def distributions(seed):
    """Log-probs [VOCAB] float64 of policy (from logits with gradient), reference, and a third distribution that
    sampled."""
    generator = torch.Generator().manual_seed(seed)
    logits, ref, sampler = (torch.randn(VOCAB, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    return logits, logits.log_softmax(-1), ref.log_softmax(-1), sampler.log_softmax(-1)


def averages(name, corrected=False, off_policy=False, seed=0):
    """(mean, mean gradient) of an estimator over tokens drawn from the sampler, and the policy's distributions."""
    logits, policy, ref, sampler = distributions(seed)
    sampled = (sampler if off_policy else policy).detach()
    estimate = token_kl(policy, ref, (policy - sampled).exp(), name, bias_correction=corrected)
    mean = (sampled.exp() * estimate).sum()
    (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
    return mean.detach(), gradient, (logits, policy, ref)


def gradient_of(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def reverse_kl(policy, ref):
    return (policy.exp() * (policy - ref)).sum()


def forward_kl(policy, ref):
    return reverse_kl(ref, policy)


def total_variation(policy, ref):
    return (policy.exp() - ref.exp()).abs().sum()


def nothing(policy, ref):
    return 0 * policy.sum()


@for_each("seed", range(4))
@for_each(("name", "corrected"), [("k1", False), ("k3", False), ("low_var", False), ("k1", True), ("k3", True)])
def test_unbiased_estimators_average_to_the_kl(name, corrected, seed):
    mean, _, (_, policy, ref) = averages(name, corrected, seed=seed)
    torch.testing.assert_close(mean, reverse_kl(policy, ref).detach(), rtol=1e-12, atol=0)


@for_each("seed", range(4))
@for_each(
    ("name", "objective"),
    [("k1", nothing), ("k2", reverse_kl), ("k3", forward_kl), ("low_var", forward_kl), ("abs", total_variation)],
)
def test_gradients_average_to_those_that_the_docstrings_name(name, objective, seed):
    _, gradient, (logits, policy, ref) = averages(name, seed=seed)
    torch.testing.assert_close(gradient, gradient_of(objective(policy, ref), logits), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("name", ["k1", "k3", "low_var"])
def test_weighted_by_the_ratio_value_and_gradient_average_to_those_of_the_kl(name, off_policy):
    mean, gradient, (logits, policy, ref) = averages(name, corrected=True, off_policy=off_policy)
    exact = reverse_kl(policy, ref)
    torch.testing.assert_close(mean, exact.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, gradient_of(exact, logits), rtol=1e-10, atol=1e-14)
    assert (gradient - averages(name, off_policy=off_policy)[1]).norm() > 0.1 * gradient.norm()


@pytest.mark.parametrize("name", ["k2", "abs"])
def test_weighted_by_the_ratio_the_gradient_is_that_of_the_estimators_own_average(name):
    _, gradient, (logits, policy, ref) = averages(name, corrected=True, off_policy=True)
    own_average = (policy.exp() * ESTIMATORS[name](policy, ref)).sum()
    torch.testing.assert_close(gradient, gradient_of(own_average, logits), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimate_is_zero_at_the_reference_and_all_but_k1_are_never_negative(name):
    policy, ref = torch.linspace(-9, 0, 50), torch.full((50,), -4.0)
    estimate = ESTIMATORS[name](policy, ref)
    assert ESTIMATORS[name](ref, ref).abs().max() == 0
    assert (estimate.min() < 0) == (name == "k1")


def test_low_var_is_k3_until_its_clamps_stop_value_and_gradient():
    policy = torch.tensor([-1.0, -8.0, -60.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -1.0])
    estimate = low_var(policy, ref)
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)
    assert estimate.tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, 10, 10])
    assert gradient.tolist() == pytest.approx([1 - math.exp(-0.5), 0, 0])


def test_importance_weights_take_a_gradient_of_their_own():
    policy = torch.tensor([-1.0], requires_grad=True)
    kl = ESTIMATORS["k1"](policy, torch.tensor([-3.0]))
    (gradient,) = torch.autograd.grad(importance_weighted(kl, (policy - policy.detach()).exp()).sum(), policy)
    assert gradient.item() == pytest.approx(1 + 2)
