"""torch's fused attentions for CUDA, computed by the CPU's fused kernel. torch chooses one of them before it
dispatches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten


def _heads(of: Tensor, like: Tensor) -> Tensor:
    """Keys or values [B, g, L, d], once for each of the h query heads of `like`, as the CPU's kernel needs them."""
    return of.repeat_interleave(like.shape[1] // of.shape[1], 1)


def _groups(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient [B, h, L, d] of repeated keys or values, summed for the g heads of `like`."""
    batch, heads, *rest = gradient.shape
    return gradient.view(batch, like.shape[1], heads // like.shape[1], *rest).float().sum(2).to(gradient.dtype)


def flash(
    query: Tensor, key: Tensor, value: Tensor, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> tuple:
    """Attention of query [B, h, L, d] over key and value [B, g, L, d], with the rest of what CUDA's kernel returns."""
    key, value = _heads(key, query), _heads(value, query)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, scale=scale)
    nothing = torch.empty(0, dtype=torch.int64)
    return (
        out,
        sums,
        nothing,
        nothing.clone(),
        query.shape[2],
        key.shape[2],
        nothing.clone(),
        nothing.clone(),
        nothing.clone(),
    )


def flash_backward(
    grad,
    query,
    key,
    value,
    out,
    sums,
    places_q,
    places_k,
    max_q,
    max_k,
    dropout,
    is_causal,
    seed,
    offset,
    *,
    scale=None,
) -> tuple:
    """The gradients of query, key and value."""
    wide = _heads(key, query), _heads(value, query)
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, *wide, out, sums, dropout, is_causal, scale=scale
    )
    return found[0], _groups(found[1], key), _groups(found[2], value)


FUSED: dict[str, Callable[..., tuple]] = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
}
