"""What each token adds to the gradient is the same number, bit for bit, wherever the token is packed."""

import itertools
from dataclasses import replace

import pytest
import torch
from tiny_policy import tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.data.packing import PackingRules, pack
from megagrpo.types import LossInputs
from megagrpo.verify.shrink import random_samples

LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo"]
# One micro-batch for all, a few, as many as there are samples; padded for context parallelism; behind shared prompts.
RULES = [
    PackingRules(max_tokens=10_000),
    PackingRules(max_tokens=64),
    PackingRules(max_tokens=32, at_least=7),
    PackingRules(max_tokens=64, align=8, sequence_align=4),
    PackingRules(max_tokens=96, share_prompts=True),
    PackingRules(max_tokens=96, align=4, sequence_align=4, share_prompts=True),
]


def contributions(loss_type: str, rules: PackingRules, dp_size: int, dtype: torch.dtype) -> dict[float, float]:
    """Of each token, known by its rollout log-prob: the derivative of the step's loss by the policy's log-prob."""
    config = tiny_run(algorithm=dict(loss_type=loss_type, beta=0.1))
    found = {}
    for rank in range(dp_size):
        batch = pack(random_samples(), rules, rank, dp_size)
        divisor = denominator(batch, loss_type, config.rollout.max_completion_length)
        for micro_batch in batch.micro_batches:
            tags = micro_batch.rollout_logprobs.to(dtype)
            policy = (tags + 0.3 * torch.sin(40 * tags)).requires_grad_()
            inputs = replace(micro_batch, old_logprobs=tags, ref_logprobs=tags - 0.2)
            numerator = make_loss(config)(LossInputs(policy, torch.zeros_like(policy), inputs)).numerator
            (gradient,) = torch.autograd.grad(numerator, policy)
            mask = micro_batch.loss_mask
            assert not gradient[~mask].any()
            found |= dict(zip(tags[mask].tolist(), (gradient[mask] / divisor).tolist(), strict=True))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism(loss_type, dtype):
    expected = contributions(loss_type, RULES[0], 1, dtype)
    assert len(expected) == sum(int(s.response_mask.sum()) for s in random_samples()) and any(expected.values())
    for rules, dp_size in itertools.product(RULES, (1, 2, 3)):
        assert contributions(loss_type, rules, dp_size, dtype) == expected


def test_the_counts_are_those_of_the_step_on_every_rank():
    samples = random_samples()
    tokens = sum(int(s.response_mask.sum()) for s in samples)
    for rules, dp_size in itertools.product(RULES, (1, 2, 3)):
        for rank in range(dp_size):
            batch = pack(samples, rules, rank, dp_size)
            assert [denominator(batch, loss, 16) for loss in LOSSES] == [len(samples), tokens, len(samples) * 16, tokens]
