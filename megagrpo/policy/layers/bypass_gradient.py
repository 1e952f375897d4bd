"""Gradients of a tensor that decoder blocks read beside the hidden states.

Such a block may be inside an activation checkpoint, whose backward pass reaches only the block's input. So blocks read
a leaf, a detached copy, which collects their gradients. Its source gets them when the backward pass arrives there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def leaf_of(source: Tensor) -> Tensor:
    """Return the copy of `source` that blocks read, in the same memory."""
    return source.detach().requires_grad_()


def detour(x: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
    """Return x. Its backward pass also gives `source` the gradient that `leaf` has by then. Every block that reads the
    leaf must come after x in the forward pass."""
    return _Detour.apply(x, source, [leaf])  # as an input the leaf would wait for this backward pass


class _Detour(torch.autograd.Function):
    """`detour`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, leaf: list[Tensor]) -> Tensor:
        (ctx.leaf,) = leaf
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        collected, ctx.leaf.grad = ctx.leaf.grad, None
        return grad, collected, None
