"""Each token's contribution to the gradient is bit-identical wherever the token is packed."""

import itertools

import pytest
import torch
from tiny_policy import tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config.sections.loss_table import LOSSES as LOSS_TABLE
from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.train_types import LossInputs
from tests.unit.for_each import for_each

COUNTED = ["grpo", "dapo", "dr_grpo", "bnpo"]
LOSSES = {loss_type: dict(loss_type=loss_type) for loss_type in LOSS_TABLE} | {
    "cispo": dict(loss_type="cispo", epsilon_high=1.1),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence"),
    "gspo token": dict(loss_type="luspo", importance_sampling_level="sequence_token", use_bias_correction_kl=True),
    "corrected": dict(loss_type="sapo", importance_correction="geometric_truncate", importance_correction_max=1.01),
}
# One micro-batch for all samples, a few, one for each sample; padded for context parallelism; after shared prompts.
RULES = [
    PackingRules(max_tokens=10_000),
    PackingRules(max_tokens=64),
    PackingRules(max_tokens=32, at_least=7),
    PackingRules(max_tokens=64, align=8, sequence_align=4),
    PackingRules(max_tokens=96, share_prompts=True),
    PackingRules(max_tokens=96, align=4, sequence_align=4, share_prompts=True),
]


def moved(logprobs: torch.Tensor) -> torch.Tensor:
    """The policy's log-probs of tokens sampled with these log-probs."""
    return logprobs + 0.3 * torch.sin(40 * logprobs)


def contributions(name: str, rules: PackingRules, dp_size: int, dtype: torch.dtype) -> dict[float, float]:
    """For each token, identified by its rollout log-prob: the derivative of the step's loss by the policy's
    log-prob."""
    config, found = tiny_run(algorithm=dict(beta=0.1) | LOSSES[name]), {}
    batches = [pack(random_samples(), rules, rank, dp_size) for rank in range(dp_size)]
    divisor = denominator(batches[0], config.algorithm.loss.average, config.rollout.max_completion_length)
    for batch in batches:
        for micro_batch in batch.micro_batches:
            tags = micro_batch.rollout_logprobs.to(dtype)
            policy = moved(tags).requires_grad_()
            inputs = micro_batch.with_terms(old_logprobs=tags, ref_logprobs=tags - 0.2)
            numerator = make_loss(config.algorithm)(LossInputs(policy, torch.zeros_like(policy), inputs)).numerator
            (gradient,) = torch.autograd.grad(numerator, policy)
            mask = micro_batch.loss_mask
            assert not gradient[~mask].any()
            found |= dict(zip(tags[mask].tolist(), (gradient[mask] / divisor).tolist(), strict=True))
    return found


@for_each("dtype", [torch.float64, torch.float32])
@for_each("name", COUNTED)
def test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism(name, dtype):
    expected = contributions(name, RULES[0], 1, dtype)
    assert len(expected) == sum(int(s.response_mask.sum()) for s in random_samples()) and any(expected.values())
    for rules, dp_size in itertools.product(RULES, (1, 2, 3)):
        assert contributions(name, rules, dp_size, dtype) == expected


@for_each("name", [name for name in LOSSES if name not in COUNTED])
def test_so_it_is_with_every_loss_but_for_the_last_bit_of_an_exponential(name):
    """torch computes this function differently at the end of a row than in its middle."""
    expected = contributions(name, RULES[0], 1, torch.float64)
    for rules, dp_size in itertools.product(RULES, (1, 2, 3)):
        assert contributions(name, rules, dp_size, torch.float64) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_the_counts_are_those_of_the_step_on_every_rank():
    samples = random_samples()
    tokens = sum(int(s.response_mask.sum()) for s in samples)
    for rules, dp_size in itertools.product(RULES, (1, 2, 3)):
        for rank in range(dp_size):
            batch = pack(samples, rules, rank, dp_size)
            found = [denominator(batch, LOSS_TABLE[loss].average, 16) for loss in COUNTED]
            assert found == [len(samples), tokens, len(samples) * 16, tokens]
