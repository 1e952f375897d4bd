"""Transformer Engine's layers on a fake GPU: its kernels in torch (te_kernels.py), and those of the optimizer, which
only a GPU takes. Routers and the sending of tokens use Megatron's code in place of fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from te_kernels import put_kernels
from torch import Tensor

Lists = list[list[Tensor]]


def replace_kernels() -> None:
    """Replace Transformer Engine's kernels in this process by torch functions on its fake GPU."""
    from transformer_engine.pytorch.cpp_extensions import gemm

    from megagrpo.policy.transformer import transformer_config

    transformer_config._routing_kernels = lambda own_choice: dict(moe_permute_fusion=False, moe_router_fusion=False)
    gemm.get_cublas_workspace_size_bytes = lambda: 1
    put_kernels(multi_tensor_l2norm, multi_tensor_scale, multi_tensor_scale_tensor, multi_tensor_adam)


def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: Lists, of_each: bool = False) -> tuple[Tensor, Tensor]:
    """The norm of all tensors together, [1], and the norms of each, if requested."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms if of_each else norms.new_empty(0)


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Lists, scale: float | Tensor) -> None:
    """Write each tensor of the first list, scaled, to the second."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)


def multi_tensor_scale_tensor(chunk: int, overflow: Tensor, lists: Lists, scale: Tensor) -> None:
    """Like `multi_tensor_scale`, with a scale on the device."""
    multi_tensor_scale(chunk, overflow, lists, scale)


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: Lists,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    *rest: Any,
) -> None:
    """AdamW in float32: gradients, parameters, both moments, and masters if any. `rest`: mode, whether to correct the
    moments, decay."""
    decoupled, corrected, decay = rest
    assert decoupled
    for gradient, parameter, first, second, *master in zip(*lists, strict=True):
        values, g = master[0] if master else parameter, gradient.float()
        first.mul_(beta1).add_(g, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        mean, square = (first / (1 - beta1**step), second / (1 - beta2**step)) if corrected else (first, second)
        values.copy_(values - rate * (mean / (square.sqrt() + epsilon) + decay * values))
        if master:
            parameter.copy_(values)
