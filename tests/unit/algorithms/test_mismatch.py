"""Mismatch metrics between trainer and engine log-probs, as NeMo-RL and TRL define them, against naive formulas for
each token."""

import math

import pytest
import torch

from megagrpo.algorithms.losses import mismatch_metrics

MEANS = (
    "token_mult_prob_error gen_kl_error policy_kl_error js_divergence_error sampling/sampling_logp_difference/mean"
).split()
MAX = "sampling/sampling_logp_difference/max"


def tokens(n, spread=0.3):
    """Log-probs of trainer and engine [n] float64, and the mask of tokens that count."""
    generator = torch.Generator().manual_seed(3)
    old = -6 * torch.rand(n, generator=generator, dtype=torch.float64)
    rollout = old + spread * torch.randn(n, generator=generator, dtype=torch.float64)
    return old, rollout.clamp(max=0), torch.rand(n, generator=generator) < 0.7


def naive(old, rollout):
    """Each metric of one token, in plain Python arithmetic."""
    p, q = math.exp(old), math.exp(rollout)
    mixture = 0.5 * p + 0.5 * q
    return {
        "token_mult_prob_error": max(p / q, q / p),
        "gen_kl_error": p / q - math.log(p / q) - 1,
        "policy_kl_error": q / p - math.log(q / p) - 1,
        "js_divergence_error": 0.5 * (p / mixture - math.log(p / mixture) - 1)
        + 0.5 * (q / mixture - math.log(q / mixture) - 1),
        "sampling/sampling_logp_difference/mean": abs(old - rollout),
    }


@pytest.mark.parametrize("name", MEANS)
def test_every_mean_is_that_of_the_naive_formula_over_loss_tokens(name):
    old, rollout, mask = tokens(200)
    metric = mismatch_metrics(old, rollout, mask)[name]
    counted = [naive(o, r)[name] for o, r, m in zip(old.tolist(), rollout.tolist(), mask.tolist(), strict=True) if m]
    assert metric.count == len(counted) and 100 < len(counted) < 200
    assert metric.value.item() == pytest.approx(sum(counted) / len(counted), rel=1e-9)


def test_the_two_divergences_are_opposite_directions_and_the_third_is_symmetric():
    old, rollout, mask = tokens(200, spread=1.0)
    here, there = mismatch_metrics(old, rollout, mask), mismatch_metrics(rollout, old, mask)
    assert here["gen_kl_error"].sum == there["policy_kl_error"].sum != here["policy_kl_error"].sum
    assert here["js_divergence_error"].sum == there["js_divergence_error"].sum


def test_the_largest_difference_is_that_of_a_loss_token():
    old, rollout, mask = tokens(50)
    rollout[mask.logical_not().nonzero()[0]] = -100.0
    expected = max(abs(o - r) for o, r, m in zip(old.tolist(), rollout.tolist(), mask.tolist(), strict=True) if m)
    assert mismatch_metrics(old, rollout, mask)[MAX].value.item() == expected < 2


def test_agreement_is_one_and_zeros_also_in_float32():
    old, _, mask = tokens(50)
    metrics = mismatch_metrics(old.float(), old.float(), mask)
    assert metrics["token_mult_prob_error"].sum == metrics["token_mult_prob_error"].count > 0
    assert [metrics[name].sum.item() for name in [*MEANS[1:], MAX]] == pytest.approx([0.0] * 5, abs=1e-5)


def test_sums_over_parts_give_the_whole():
    old, rollout, mask = tokens(97)
    whole = mismatch_metrics(old, rollout, mask)
    parts = [mismatch_metrics(old[cut], rollout[cut], mask[cut]) for cut in (slice(0, 1), slice(1, 60), slice(60, 97))]
    for name in MEANS:
        merged = parts[0][name].merge(parts[1][name]).merge(parts[2][name])
        assert (
            merged.sum.item() == pytest.approx(whole[name].sum.item(), rel=1e-12) and merged.count == whole[name].count
        )
    assert parts[0][MAX].merge(parts[1][MAX]).merge(parts[2][MAX]) == whole[MAX]


def test_what_the_mask_hides_may_be_infinite_and_no_gradient_flows():
    old, rollout, mask = tokens(20)
    old = torch.where(mask, old, -torch.inf).requires_grad_()
    metrics = mismatch_metrics(old, rollout, mask)
    assert all(metric.sum.isfinite() and not metric.sum.requires_grad for metric in metrics.values())
