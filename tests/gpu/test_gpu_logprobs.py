"""The fused log-probs on a GPU, where their kernels are compiled: values, gradients and memory at the size of a real
vocabulary."""

import pytest
import torch

from megagrpo.platform import device
from megagrpo.policy.lm_head.fp8 import in_fp8
from megagrpo.policy.lm_head.fused_logprobs import SCRATCH_BYTES
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs

TOKENS, HIDDEN, VOCAB = 3000, 896, 151_936
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device.has_gpu() or device.no_fused_kernels() is not None, reason="needs a Hopper GPU"),
]


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda") * 3 * HIDDEN**-0.5).bfloat16()
    labels = torch.randint(0, VOCAB - 100, (TOKENS,), device="cuda")
    return hidden, weight, labels, torch.randn(2, TOKENS, device="cuda")


def answer(problem, dtype=torch.bfloat16, early=True, **options):
    """Log-probs, entropy, and the gradients of hidden states and head, in float32."""
    hidden, weight, labels, upstream = problem
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
    early_gradients = (lambda rows, *found: tuple(upstream[: len(found), rows])) if early else None
    outputs = vocab_logprobs(
        *leaves, HeadTask(labels, vocab_size=VOCAB - 100, temperature=0.7, upstream=early_gradients, **options)
    )
    taught = [o for o in outputs if o.requires_grad]
    gradients = torch.autograd.grad(taught, leaves, tuple(upstream[: len(taught)]))
    return [t.detach().float() for t in (*outputs, *gradients)]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("options", [{}, dict(logit_cap=5.0, entropy_gradient=True)])
def test_values_and_gradients_are_those_of_the_chunked_path_in_float32(problem, options, early):
    expected = answer(problem, torch.float32, **options)
    found = answer(problem, early=early, fused=True, **options)
    for got, want, error in zip(found, expected, (1e-4, 1e-4, 0.02, 0.02), strict=True):
        assert (got - want).norm() <= error * want.norm()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_fp8_gives_the_distribution_of_the_rounded_factors(problem, recipe):
    hidden, weight, labels, _ = problem
    logprobs, entropy, *_ = answer(problem, fused=True, fp8=recipe)
    exact, _, *gradients = answer(problem, torch.float32)
    assert 1e-4 < (logprobs - exact).abs().mean() < 0.2  # 0.14 on an H200, of log-probs from -16 to -27
    for got, want in zip(answer(problem, fused=True, fp8=recipe)[2:], gradients, strict=True):
        assert (got - want).norm() < 0.2 * want.norm()
    if recipe == "tensorwise":
        rounded = [
            f.values.float() * f.scales for f in (in_fp8(hidden, recipe, 1), in_fp8(weight[: VOCAB - 100], recipe, 128))
        ]
        found = vocab_logprobs(*rounded, HeadTask(labels, temperature=0.7))
        assert (logprobs - found[0]).abs().max() < 1e-2 and (entropy - found[1]).abs().max() < 1e-2


def test_no_logits_are_held(problem):
    hidden, weight, labels, _ = problem
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        vocab_logprobs(hidden, weight, HeadTask(labels, fused=True))
    assert torch.cuda.max_memory_allocated() - before < 32 * 2**20
    answer(problem, fused=True)
    gradients = weight.numel() * (4 + 2 + 2 + 4) + 16 * hidden.numel()
    assert torch.cuda.max_memory_allocated() - before < SCRATCH_BYTES + gradients + 2**28
