"""Rotary embedding, RMSNorm and gated activations with hand-written backward passes, used without Transformer Engine.

On a CPU these operations are memory-bound. Autograd would read each activation 2 to 3 times as often and keep more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Apply rotary embedding (Su et al. 2021, arXiv 2104.09864) to the first 2n elements of x [..., d]; copy the rest.

    `cos` and `sin` [..., n] broadcast against the pairs. Pairs are elements (i, n + i), or (2i, 2i + 1) when
    `interleaved`. Returns x's shape and dtype.
    """
    return _Rotate.apply(x, cos, sin, interleaved)


class _Rotate(torch.autograd.Function):
    """`rotate`; the gradient of x [..., d] is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin, ctx.interleaved), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = 2 * cos.shape[-1]
    (x1, x2), (out1, out2) = _sides(x[..., :turned], interleaved), _sides(out[..., :turned], interleaved)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin)
    if turned < x.shape[-1]:
        out[..., turned:] = x[..., turned:]
    return out


def _sides(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second element of each pair."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight [..., H] for x [..., H] and weight [H], in x's dtype (Zhang and
    Sennrich 2019, arXiv 1910.07467).

    Statistics are float32, or float64 for float64 inputs.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """`rms_norm`, with gradients of x [..., H] and weight [H]. It saves x, the weight and one float per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        scale, wide_grad = weight.to(inverse.dtype), grad.to(inverse.dtype)
        normed = x * inverse
        product = wide_grad * normed
        along = (product @ scale)[..., None]  # projection of the gradient on x; the norm removes it
        grad_x = (wide_grad * scale).addcmul_(normed, along, value=-1 / x.shape[-1]).mul_(inverse)
        return grad_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F] for x [..., 2 F] = [gate, up], in x's dtype (Shazeer 2020, arXiv 2002.05202)."""
    return _Gated.apply(x, F.silu, torch.ops.aten.silu_backward.grad_input)


def geglu(x: Tensor) -> Tensor:
    """Return gelu(gate) * up [..., F] for x [..., 2 F] = [gate, up], in x's dtype, with gelu's tanh approximation."""
    return _Gated.apply(
        x, partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")
    )


def xielu(x: Tensor, positive: Tensor, negative: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return xIELU (Huang and Schlag 2024, arXiv 2411.13010) of x in x's dtype: positive x^2 + beta x where x > 0, and
    negative (exp(min(x, eps)) - 1 - x) + beta x elsewhere. The other arguments have one element. Gradients go to x,
    `positive` and `negative`."""
    return _Xielu.apply(x, positive, negative, beta, eps)


class _Xielu(torch.autograd.Function):
    """`xielu`, computed in float32 or wider. It saves x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positive: Tensor, negative: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        ctx.save_for_backward(x, positive, negative, beta, eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        below = (torch.expm1(torch.minimum(wide, eps.to(wide))) - wide).mul_(negative)
        return torch.where(wide > 0, positive * wide.square(), below).add_(beta * wide).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, positive, negative, beta, eps = ctx.saved_tensors
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        upper, small, out = wide > 0, torch.expm1(torch.minimum(wide, eps.to(wide))), grad.to(wide)
        inner = torch.where(wide < eps, small, -1.0)  # the minimum is constant between eps and 0
        slope = torch.where(upper, 2 * positive * wide, negative * inner).add_(beta)
        # over all elements, which almost cancel
        of_positive = (out * wide.square()).masked_fill_(~upper, 0).sum(dtype=torch.float64)
        of_negative = (out * (small - wide)).masked_fill_(upper, 0).sum(dtype=torch.float64)
        grads = (part.to(one.dtype).view_as(one) for part, one in ((of_positive, positive), (of_negative, negative)))
        return slope.mul_(out).to(x.dtype), *grads, None, None


class _Gated(torch.autograd.Function):
    """activation(gate) * up [..., F] of x [..., 2 F]. It saves x only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: Callable[[Tensor], Tensor], its_backward: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.its_backward = activation, its_backward
        gate, up = x.chunk(2, -1)
        return activation(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        ctx.its_backward(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, ctx.activation(gate), out=grad_up)
        return grad_x, None, None
