"""Gradients of tensors that blocks read beside the hidden states, inside and outside of activation checkpoints."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megagrpo.policy.layers.bypass_gradient import detour, leaf_of


def block(hidden: Tensor, beside: Tensor) -> Tensor:
    return hidden + hidden.tanh() * beside


def gradients(x: Tensor, weight: Tensor, apart: bool, by_leaf: bool, recomputes: bool) -> list[Tensor | None]:
    """Gradients of x and weight, after two blocks that read a tensor beside the hidden states."""
    x, weight = (tensor.clone().requires_grad_() for tensor in (x, weight))
    hidden = x * weight
    beside = weight.sin() if apart else hidden
    if by_leaf:
        leaf = leaf_of(beside)
        hidden, beside = detour(hidden, beside, leaf), leaf
    for _ in range(2):
        hidden = checkpoint(block, hidden, beside, use_reentrant=True) if recomputes else block(hidden, beside)
    hidden.sum().backward()
    return [x.grad, weight.grad]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["of the hidden states", "apart"])
def test_the_source_gets_the_gradients_of_all_blocks(recomputes, apart):
    x, weight = torch.randn(2, 4, 3, dtype=torch.float64)
    found = gradients(x, weight, apart, by_leaf=True, recomputes=recomputes)
    torch.testing.assert_close(found, gradients(x, weight, apart, by_leaf=False, recomputes=False))


def test_a_source_that_no_block_reads_gets_none():
    x, source = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    detour(2 * x, source, leaf_of(source)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0] and source.grad is None
