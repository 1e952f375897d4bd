"""The k largest log-probs of a chunked LM head, against a full softmax in float64."""

import pytest
import torch

from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.top_logprobs import top_logprobs
from megagrpo.types import Truncation
from tests.unit.for_each import for_each


def problem(dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 12, generator=generator, dtype=dtype)
    weight = torch.randn(40, 12, generator=generator, dtype=dtype)
    return hidden, weight, torch.randint(0, 37, (11,), generator=generator)


def naive(hidden, weight, k, temperature, vocab_size, cap):
    logits = hidden.double() @ weight[:vocab_size].double().t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return (logits / temperature).log_softmax(-1).topk(k, dim=-1)


@for_each("cap", [None, 3.0])
@for_each(("k", "vocab_size", "chunk"), [(1, 37, 4), (5, 37, 256), (37, 37, 3), (40, None, 4)])
def test_values_and_ids_are_those_of_a_full_softmax(k, vocab_size, chunk, cap):
    hidden, weight, labels = problem()
    task = HeadTask(labels, temperature=0.7, vocab_size=vocab_size, chunk=chunk, logit_cap=cap)
    top, expected = top_logprobs(hidden, weight, k, task), naive(hidden, weight, k, 0.7, vocab_size, cap)
    torch.testing.assert_close(top.logprobs, expected.values, rtol=1e-12, atol=1e-12)
    assert torch.equal(top.token_ids, expected.indices)


def test_rules_of_the_sampler_do_not_apply():
    hidden, weight, labels = problem()
    plain, ruled = (
        top_logprobs(hidden, weight, 5, HeadTask(labels, **of)) for of in ({}, dict(truncation=Truncation(top_k=2)))
    )
    assert torch.equal(plain.logprobs, ruled.logprobs)


def test_bfloat16_gives_float32_and_no_gradient():
    hidden, weight, labels = problem(torch.bfloat16)
    top = top_logprobs(hidden.requires_grad_(), weight, 3, HeadTask(labels))
    assert top.logprobs.dtype == torch.float32 and not top.logprobs.requires_grad
    torch.testing.assert_close(top.logprobs.double(), naive(hidden, weight, 3, 1, None, None).values, rtol=0, atol=0.1)


@pytest.mark.parametrize(("k", "vocab_size"), [(0, 37), (38, 37), (41, None)])
def test_a_k_that_the_vocabulary_does_not_have_is_an_error(k, vocab_size):
    hidden, weight, labels = problem()
    with pytest.raises(ValueError, match=f"k: {k} is not between 1 and"):
        top_logprobs(hidden, weight, k, HeadTask(labels, vocab_size=vocab_size))
