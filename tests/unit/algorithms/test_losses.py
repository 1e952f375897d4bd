import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.kl import ESTIMATORS
from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import PackingRules, build_micro_batch, pack
from megagrpo.train_types import LossInputs, TrainSample
from tests.unit.for_each import for_each

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "losses.json").read_text())
PROMPT = 2  # tokens before each response


def config(**algorithm):
    base = {
        "model": {"path": "x"},
        "data": {"train": {"source": "x"}},
        "rewards": {"functions": [{"function": "exact_number"}]},
    }
    return RunConfig.model_validate(base | {"algorithm": algorithm})


def samples_of(inputs):
    """The vectors' padded rows as training samples: PROMPT prompt tokens, then the unmasked response tokens."""
    samples = []
    for mask, old, advantage in zip(inputs["mask"], inputs["old"], inputs["advantages"], strict=True):
        length = sum(mask)
        response_mask = torch.tensor([False] * PROMPT + [True] * length)
        logprobs = torch.tensor([0.0] * PROMPT + old[:length])
        samples.append(TrainSample(torch.arange(PROMPT + length), response_mask, logprobs, advantage))
    return samples


def rows(inputs, name):
    """One of the vectors' padded [B, T] arrays in the label-aligned layout of a packed micro-batch."""
    out = []
    for mask, row in zip(inputs["mask"], inputs[name], strict=True):
        length = sum(mask)
        out += [0.0] * (PROMPT - 1) + row[:length] + [0.0]
    return torch.tensor(out, dtype=torch.float64)


def run(inputs, settings, with_ref=True):
    samples = samples_of(inputs)
    batch = build_micro_batch(samples)
    batch = replace(batch, advantages=batch.advantages.double()).with_terms(old_logprobs=rows(inputs, "old"))
    if settings.algorithm.beta and with_ref:
        batch = batch.with_terms(ref_logprobs=rows(inputs, "ref"))
    policy = rows(inputs, "new").requires_grad_()
    output = make_loss(settings.algorithm)(LossInputs(policy, rows(inputs, "entropy"), batch))
    counts = pack(samples, PackingRules(max_tokens=1000))
    divisor = denominator(counts, settings.algorithm.loss.average, settings.rollout.max_completion_length)
    return batch, policy, output, divisor


@for_each("case", VECTORS["cases"])
def test_loss_and_gradient_equal_the_reference_systems(case):
    inputs = VECTORS["inputs"]
    names = ("loss_type", "beta", "epsilon", "epsilon_high", "use_bias_correction_kl")
    settings = config(**{name: case[name] for name in names if name in case})
    rollout = settings.rollout.model_copy(update={"max_completion_length": case["max_completion_length"]})
    settings = settings.model_copy(update={"rollout": rollout})
    batch, policy, output, divisor = run(inputs, settings)
    loss = output.numerator / divisor
    assert loss.item() == pytest.approx(case["loss"], rel=1e-6, abs=1e-8)
    (grad,) = torch.autograd.grad(loss, policy)
    mask = torch.tensor(inputs["mask"]).bool()
    torch.testing.assert_close(
        grad[batch.loss_mask], torch.tensor(case["grad_logps"]).double()[mask], rtol=1e-5, atol=1e-7
    )
    assert grad[~batch.loss_mask].abs().max() == 0
    if "kl" in case["metrics"] and "trl" in case["source"]:
        assert output.metrics["kl"].value.item() == pytest.approx(case["metrics"]["kl"], rel=1e-6)


@pytest.mark.parametrize("case", [c for c in VECTORS["cases"] if "trl" in c["source"]], ids=lambda c: c["name"])
def test_clip_ratios_and_entropy_equal_those_trl_logs(case):
    _, _, output, _ = run(VECTORS["inputs"], config(loss_type=case["loss_type"]))
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "entropy"):
        assert output.metrics[name].value.item() == pytest.approx(case["metrics"][name], rel=1e-5), name


def test_epsilon_high_widens_only_the_upper_side():
    inputs = VECTORS["inputs"]
    narrow, wide = (run(inputs, config(loss_type="dapo", epsilon_high=e))[2].metrics for e in (None, 0.9))
    assert wide["clip_ratio/high_mean"].sum < narrow["clip_ratio/high_mean"].sum
    assert wide["clip_ratio/low_mean"].sum == narrow["clip_ratio/low_mean"].sum > 0


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    inputs = VECTORS["inputs"]
    batch = build_micro_batch(samples_of(inputs))
    policy = rows(inputs, "new").float().requires_grad_()
    output = make_loss(config(loss_type="dapo").algorithm)(LossInputs(policy, torch.zeros_like(policy), batch))
    (grad,) = torch.autograd.grad(output.numerator, policy)
    torch.testing.assert_close(grad, torch.where(batch.loss_mask, -batch.advantages, 0.0))
    assert output.metrics["clip_ratio/region_mean"].sum == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "low_var"])
def test_the_kl_term_is_that_of_the_estimator_in_the_config(estimator):
    inputs = VECTORS["inputs"]
    batch, policy, output, _ = run(inputs, config(loss_type="dapo", beta=0.5, kl_estimator=estimator))
    _, _, without, _ = run(inputs, config(loss_type="dapo"))
    expected = torch.where(batch.loss_mask, ESTIMATORS[estimator](policy, rows(inputs, "ref")), 0.0).sum()
    assert output.metrics["kl"].sum.item() == pytest.approx(expected.item())
    assert (output.numerator - without.numerator).item() == pytest.approx(0.5 * expected.item())


@pytest.mark.parametrize("estimator", ["full_forward", "full_reverse"])
def test_an_exact_kl_term_is_taken_from_the_policy_as_it_is(estimator):
    inputs = VECTORS["inputs"]
    batch = build_micro_batch(samples_of(inputs)).with_terms(old_logprobs=rows(inputs, "old"))
    policy, full_kl = rows(inputs, "new"), rows(inputs, "entropy").requires_grad_()
    loss = make_loss(config(loss_type="dapo", beta=0.5, kl_estimator=estimator).algorithm)
    output = loss(LossInputs(policy, rows(inputs, "entropy"), batch, full_kl))
    (grad,) = torch.autograd.grad(output.numerator, full_kl)
    assert torch.equal(grad, 0.5 * batch.loss_mask)
    assert output.metrics["kl"].sum.item() == pytest.approx(full_kl[batch.loss_mask].sum().item())


def test_mismatch_metrics_are_those_of_the_engine_against_old_logprobs():
    inputs = VECTORS["inputs"]
    batch = build_micro_batch(samples_of(inputs)).with_terms(old_logprobs=rows(inputs, "old"))
    batch = replace(batch, rollout_logprobs=rows(inputs, "old") + 0.25)
    policy = rows(inputs, "new")
    metrics = make_loss(config().algorithm)(LossInputs(policy, policy, batch)).metrics
    assert metrics["token_mult_prob_error"].value.item() == pytest.approx(torch.tensor(0.25).exp().item())
    assert metrics["sampling/sampling_logp_difference/max"].value.item() == pytest.approx(0.25)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_cutting_the_batch_into_micro_batches_changes_neither_loss_nor_gradient(loss_type):
    inputs, settings = VECTORS["inputs"], config(loss_type=loss_type, beta=0.1)
    samples = samples_of(inputs)
    _, policy, whole, _ = run(inputs, settings)
    (expected,) = torch.autograd.grad(whole.numerator, policy)
    total, offset, grads = 0.0, 0, []
    for sample, old in zip(samples, _split(rows(inputs, "old"), samples), strict=True):
        batch = build_micro_batch([sample])
        length = sample.token_ids.numel()
        part = policy.detach()[offset : offset + length].requires_grad_()
        ref = rows(inputs, "ref")[offset : offset + length]
        batch = replace(batch, advantages=batch.advantages.double()).with_terms(old_logprobs=old, ref_logprobs=ref)
        output = make_loss(settings.algorithm)(LossInputs(part, part.detach(), batch))
        grads.append(torch.autograd.grad(output.numerator, part)[0])
        total, offset = total + output.numerator.item(), offset + length
    assert total == pytest.approx(whole.numerator.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat(grads), expected, rtol=1e-12, atol=1e-14)


def _split(row, samples):
    return row.split([s.token_ids.numel() for s in samples])


def test_a_masked_infinity_does_not_poison_the_loss():
    inputs = VECTORS["inputs"]
    batch = build_micro_batch(samples_of(inputs))
    policy = torch.where(batch.loss_mask, rows(inputs, "new"), -torch.inf).requires_grad_()
    batch = batch.with_terms(old_logprobs=rows(inputs, "old"))
    output = make_loss(config().algorithm)(LossInputs(policy, torch.zeros_like(policy), batch))
    assert output.numerator.isfinite()


def test_a_step_without_loss_tokens_has_denominator_one():
    assert denominator(pack([], PackingRules(max_tokens=8)), "tokens", 8) == 1
