"""Edge cases of losses and advantages: nothing to learn from, one token, two responses, no reward, no probability."""

import math

import pytest
import torch

from megagrpo.algorithms.advantages import group_advantages, normalized_sum_advantages
from megagrpo.algorithms.correction import correction_weights
from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.algorithms.sequences import Sequences
from megagrpo.config import RunConfig
from megagrpo.config.sections.loss_table import LOSSES
from megagrpo.data.packing.sample_packing import build_micro_batch
from megagrpo.proof.audit import naive_loss
from megagrpo.train_types import LossInputs, TrainBatch, TrainSample
from tests.unit.for_each import for_each

OPTIONS = {name: dict(loss_type=name) for name in LOSSES} | {
    "cispo": dict(loss_type="cispo", epsilon_high=5.0),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence"),
    "gspo token": dict(loss_type="grpo", importance_sampling_level="sequence_token"),
}


def settings(**algorithm):
    base = {
        "model": {"path": "x"},
        "data": {"train": {"source": "x"}},
        "rewards": {"functions": [{"function": "exact_number"}]},
    }
    return RunConfig.model_validate(base | {"algorithm": algorithm, "rollout": {"num_generations": 2}})


def step(name, advantages, lengths, policy=-1.1, old=-1.2):
    """(loss, gradient [T], loss mask) of responses of these lengths to one prompt, with these log-probs for all tokens,
    in one batch."""
    config = settings(**OPTIONS[name])
    samples = []
    for index, (advantage, length) in enumerate(zip(advantages, lengths, strict=True)):
        mask = torch.tensor([False] * 2 + [True] * length + [False] * (3 - length))
        samples.append(TrainSample(torch.arange(5), mask, torch.full((5,), -1.1), advantage, index))
    batch = build_micro_batch(samples)
    batch = batch.with_terms(old_logprobs=torch.full((batch.num_tokens,), old))
    logprobs = torch.full((batch.num_tokens,), policy, requires_grad=True)
    numerator = make_loss(config.algorithm)(LossInputs(logprobs, torch.zeros_like(logprobs), batch)).numerator
    (gradient,) = torch.autograd.grad(numerator, logprobs)
    divisor = denominator(TrainBatch((batch,), sum(lengths), len(lengths)), config.algorithm.loss.average, 3)
    return numerator / divisor, gradient / divisor, batch.loss_mask


@for_each("name", OPTIONS)
def test_responses_that_are_masked_whole_give_loss_and_gradient_0(name):
    loss, gradient, mask = step(name, [1.0, -1.0], [0, 0])
    assert not mask.any() and loss == 0 and not gradient.any()


@for_each("name", OPTIONS)
def test_a_masked_response_adds_nothing_beside_one_that_counts(name):
    _, gradient, mask = step(name, [1.0, -1.0], [3, 0])
    assert gradient[mask].abs().min() > 0 and not gradient[~mask].any()


@for_each("name", OPTIONS)
def test_a_response_of_one_token_has_the_loss_of_the_formula(name):
    algorithm = settings(**OPTIONS[name]).algorithm
    rows = [torch.tensor([value], dtype=torch.float64) for value in (-1.1, -1.2, -1.1, 0.0)]
    one = naive_loss.Response(*rows, places=torch.tensor([2]), advantage=torch.tensor([1.5]).double())
    expected = naive_loss.policy_term(one, algorithm, -math.inf).sum().item()
    loss, _, _ = step(name, [1.5], [1])
    assert loss.item() == pytest.approx(expected / naive_loss.denominator([1], algorithm.loss.average, 3), rel=1e-5)


@for_each("name", OPTIONS)
def test_without_advantage_there_is_no_gradient(name):
    loss, gradient, _ = step(name, [0.0, 0.0], [3, 2])
    assert loss == 0 and not gradient.any()


@for_each("name", OPTIONS)
def test_two_responses_are_pushed_apart(name):
    _, gradient, mask = step(name, [0.7, -0.7], [3, 3])
    better, worse = gradient[mask].chunk(2)
    assert (better < 0).all() and (worse > 0).all()


# One token that has become impossible under the policy: its ratio, or its sequence's ratio, is 0.
FINITE = ["grpo", "bnpo", "dapo", "dr_grpo", "luspo", "sapo", "gmpo", "fipo", "gspo"]


@for_each("name", OPTIONS)
@for_each("sign", [1.0, -1.0])
def test_a_token_of_probability_0_leaves_the_loss_finite_or_makes_the_step_one_that_is_skipped(name, sign):
    loss, gradient, _ = step(name, [sign, -sign], [3, 3], policy=-math.inf)
    assert bool(loss.isfinite() and gradient.isfinite().all()) == (name in FINITE)
    if name in FINITE:
        assert not gradient.any()


@pytest.mark.parametrize("mode", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_what_the_engine_did_not_give_or_thought_impossible_has_a_weight(mode, action):
    sequences = Sequences.of(torch.tensor([0, 2, 4]), torch.ones(4, dtype=torch.bool))
    engine = torch.tensor([math.nan, math.nan, -math.inf, -1.0])
    weights, _ = correction_weights(torch.full((4,), -1.0), engine, sequences, f"{mode}_{action}", None, 2.0)
    high = 2.0 if action == "truncate" else 0.0
    assert weights.tolist() == [1.0, 1.0, high, 1.0 if mode == "token" else high]


ESTIMATORS = ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


@for_each("estimator", ESTIMATORS)
@for_each("scale", ["group", "batch", "none"])
def test_advantages_of_equal_rewards_and_of_none_are_0(estimator, scale):
    for rewards in ([[0.1, 0.1], [0.1, 0.1]], [[math.nan, math.nan]], [[0.3, math.nan]], [[0.3]]):
        assert not group_advantages(torch.tensor(rewards), scale, estimator).any(), rewards


@for_each("estimator", ESTIMATORS)
@for_each("scale", ["group", "batch", "none"])
def test_of_two_responses_one_is_better_and_one_as_much_worse(estimator, scale):
    (better, worse), (nothing, _) = group_advantages(
        torch.tensor([[1.0, 0.0], [math.nan, 0.5]]), scale, estimator
    ).tolist()
    assert better == pytest.approx(-worse) and better > 0 and nothing == 0


def test_gdpo_of_functions_that_could_not_score():
    rewards = torch.tensor([[[1.0, math.nan], [0.0, math.nan]], [[math.nan, math.nan], [0.5, math.nan]]])
    found = normalized_sum_advantages(rewards, torch.tensor([1.0, 2.0]))
    assert found.isfinite().all() and found[0, 0] > 0 > found[0, 1] and found[1].tolist() == [0.0, 0.0]
