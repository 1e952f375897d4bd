"""KL estimators, masks, sequence weights, log-probs and the first releases' losses equal the reference systems' results
(tests/vectors)."""

import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.advantages import group_advantages, nanstd, reward_statistics
from megagrpo.algorithms.kl import ESTIMATORS
from megagrpo.algorithms.policy_losses import Tokens, importance_ratio, keep_on_policy, vespo
from megagrpo.algorithms.sequences import Sequences
from megagrpo.config import AlgorithmSection
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs
from megagrpo.train_types import RefHead

VECTORS = Path(__file__).parents[2] / "vectors"
MISC = json.loads((VECTORS / "trl_misc.json").read_text())
DISTILLATION = json.loads((VECTORS / "trl_distillation.json").read_text())
SEED = json.loads((VECTORS / "seed_era.json").read_text())


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def as_pack(mask):
    """Concatenate the rows [B, T] of a batch."""
    rows, width = torch.tensor(mask).shape
    return Sequences.of(torch.arange(0, (rows + 1) * width, width), torch.tensor(mask).bool().flatten())


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators_and_their_gradients_are_trls(name):
    case = MISC["kl"]
    policy = tensor(case["logp"]).requires_grad_()
    found = ESTIMATORS[name](policy, tensor(case["ref_logp"]))
    torch.testing.assert_close(found, tensor(case[name]), rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    torch.testing.assert_close(gradient, tensor(case["grad_wrt_logp"][name]), rtol=1e-9, atol=1e-12)
    mask = torch.tensor(case["mask"]).bool()
    assert found[mask].mean().item() == pytest.approx(case["masked_token_mean"][name])


@pytest.mark.parametrize("case", MISC["kl"]["extremes"], ids=lambda c: f"ref {c['ref']}")
def test_far_from_the_reference_k3_is_trls_and_low_var_is_ms_swifts_k3(case):
    pair = tensor(case["logp"]), tensor(case["ref"])
    assert ESTIMATORS["k1"](*pair).item() == pytest.approx(case["k1"])
    assert ESTIMATORS["k3"](*pair).item() == pytest.approx(case["k3"])
    assert ESTIMATORS["low_var"](*pair).item() == pytest.approx(case["k3_swift"])


@pytest.mark.parametrize("case", MISC["off_policy_mask"]["cases"], ids=lambda c: f"threshold {c['threshold']}")
def test_the_sequences_kept_are_those_trl_keeps(case):
    given = MISC["off_policy_mask"]
    sequences, width = as_pack(given["mask"]), len(given["mask"][0])
    advantages = tensor(given["advantages"]).repeat_interleave(width)
    sampled = tensor(given["sampling"])
    if "sampling_nan_at" in case:
        sampled[*case["sampling_nan_at"]] = math.nan
    kept = keep_on_policy(tensor(given["logps"]).flatten(), sampled.flatten(), advantages, sequences, case["threshold"])
    assert kept.view(-1, width)[:, :1].int().tolist() == case["keep"]


@pytest.mark.parametrize(("ratios", "expected"), [(None, "phi"), ("token_is_ratio", "phi_with_is")])
def test_vespos_weights_are_trls(ratios, expected):
    given = MISC["vespo_gamma"]
    sequences, width = as_pack(given["mask"]), len(given["mask"][0])
    signs = torch.where(tensor(given["advantages"]) >= 0, 1.0, -1.0).repeat_interleave(width).double()
    moved = tensor(given["log_ratio"]).flatten().requires_grad_()
    correction = None if ratios is None else tensor(given[ratios]).flatten()
    tokens = Tokens(moved, torch.zeros_like(moved), moved.exp(), signs, sequences, correction)
    (gradient,) = torch.autograd.grad(vespo(tokens, AlgorithmSection(loss_type="vespo")).sum(), moved)
    torch.testing.assert_close(
        (-gradient * signs).view(-1, width)[:, :1], tensor(given[expected]), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("case", MISC["logprob_entropy"]["cases"], ids=lambda c: f"temperature {c['temperature']}")
def test_logprobs_and_entropy_of_logits_are_trls(case):
    logits = tensor(MISC["logprob_entropy"]["logits"])
    labels, hidden = torch.tensor(MISC["logprob_entropy"]["index"]).flatten(), logits.flatten(0, 1)
    found = vocab_logprobs(
        hidden, torch.eye(hidden.shape[1], dtype=torch.float64), HeadTask(labels, temperature=case["temperature"])
    )
    for values, name in zip(found, ("logps", "entropy"), strict=True):
        torch.testing.assert_close(values, tensor(case[name]).flatten(), rtol=1e-9, atol=1e-12)


def test_logprobs_of_the_lm_head_are_those_of_trls_kernel():
    """Without the reference's logit soft cap and scale, which no model family here has."""
    given = MISC["fused_lm_head_fp32"]
    hidden, weight = torch.tensor(given["hidden"]), torch.tensor(given["weight"])
    found = vocab_logprobs(
        hidden, weight, HeadTask(torch.tensor(given["targets"]), temperature=given["temperature"], chunk=2)
    )
    for values, name in zip(found, ("logps", "entropy"), strict=True):
        torch.testing.assert_close(values, torch.tensor(given[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", MISC["nanstd"], ids=lambda c: f"dim {c['dim']}")
def test_standard_deviations_without_nan_are_trls(case):
    values = tensor(
        [[float(x) for x in row] for row in case["x"]] if case["dim"] is not None else [float(x) for x in case["x"]]
    )
    expected = [float(x) for x in case["std"]] if case["dim"] is not None else float(case["std"])
    torch.testing.assert_close(nanstd(values, dim=case["dim"] or 0), tensor(expected), equal_nan=True)


def test_the_advantages_of_the_first_release():
    case = SEED["advantage_0f5ffad26"]
    rewards = tensor(case["rewards"]).view(-1, case["G"])
    torch.testing.assert_close(
        group_advantages(rewards, "group").flatten(), tensor(case["advantages"]), rtol=1e-6, atol=1e-7
    )
    assert reward_statistics(rewards)["reward_std"] == pytest.approx(case["reward_std"])
    assert reward_statistics(rewards)["reward"] == pytest.approx(case["reward"])


def test_the_ratio_of_gspo_token_has_the_value_of_the_sequences_and_the_gradient_of_the_token():
    sequences = as_pack([[1, 1, 0], [1, 1, 1]])
    policy = tensor([0.1, 0.3, 9.0, -0.2, 0.1, 0.4]).requires_grad_()
    old = torch.zeros_like(policy)
    one, whole = (importance_ratio(policy, old, sequences, level) for level in ("sequence_token", "sequence"))
    torch.testing.assert_close(one, whole)
    torch.testing.assert_close(torch.autograd.grad(one.sum(), policy)[0], whole.detach())


@pytest.mark.parametrize("case", DISTILLATION, ids=lambda case: case["name"])
def test_divergences_from_a_teacher_and_their_gradients_are_trls(case):
    given, settings, expected = case["inputs"], case["config"], case["expected"]
    if case["kind"] == "gkd":  # logits are hidden states before a head that is the identity
        hidden, other = tensor(given["student_logits"]), tensor(given["teacher_logits"])
        head = other_head = torch.eye(hidden.shape[-1], dtype=torch.float64)
        mask = torch.tensor(given["labels"]) != -100
    else:
        names = ("student_hidden", "teacher_hidden", "student_head", "teacher_head")
        hidden, other, head, other_head = (tensor(given[name]) for name in names)
        mask = torch.tensor(given["mask"]).bool()
    leaves = hidden.requires_grad_(), head.requires_grad_()
    beta = settings["beta"]
    task = HeadTask(
        torch.zeros(int(mask.sum())).long(),
        temperature=settings["temperature"],
        ref=RefHead(other[mask], other_head),
        direction="jensen_shannon" if beta else "forward",
        mix=beta or 0.5,
        chunk=4,
    )
    total = vocab_logprobs(hidden[mask], head, task)[2].sum()
    loss = total if settings.get("reduction") == "sum" else total / mask.sum()
    grads = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(loss.item(), expected["loss"], rtol=1e-5, atol=1e-6)
    wanted = [expected.get(name) for name in ("grad_student_logits", "grad_student_hidden")]
    torch.testing.assert_close(grads[0], tensor(wanted[0] or wanted[1]), rtol=1e-5, atol=1e-6)
    if "grad_student_head" in expected:
        torch.testing.assert_close(grads[1], tensor(expected["grad_student_head"]), rtol=1e-5, atol=1e-6)
