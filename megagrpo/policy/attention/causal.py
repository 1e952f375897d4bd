"""Causal attention over batches of sequences in plain torch: grouped heads, windows, capped scores, sinks.

It picks the cheapest supported method: batched matrix products for short sequences, the flash kernel for long ones.
Where that kernel does not support the mask, it takes blocks of queries, each with the keys that the block sees.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Up to this length batched matrix products beat the CPU's flash kernel (the scores [L, L] are then small enough to
# keep).
MAX_GROUPED_LENGTH = 128
# Queries per block. A block's mask, and with a cap or sinks its scores, take this many rows of as many elements as it
# sees keys.
BLOCK_QUERIES = 256


@dataclass(frozen=True)
class Window:
    """The keys that a query sees: the last `size` up to its own or, if `chunked`, those of its own chunk of `size`
    tokens (Llama 4)."""

    size: int
    chunked: bool = False

    def first[P: (int, Tensor)](self, position: P) -> P:
        """Return the first position that a query at `position` sees; below 0 at the start of a sequence."""
        return position - (position % self.size if self.chunked else self.size - 1)


@dataclass(frozen=True)
class Scores:
    """How scores follow from queries and keys: scale q k^T, then softcap tanh(x / softcap) with a cap.

    `sinks` [h] are scores of one more key with value 0, which all queries of a head see (GPT-OSS, arXiv 2508.10925).
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there is neither a cap nor a sink, so that torch's kernels can run."""
        return self.softcap is None and self.sinks is None


class Ahead(NamedTuple):
    """Queries that also see keys after their own: tokens of one image that see each other (Gemma 3)."""

    last: Tensor  # [S, L] int64, index of the last key that each query sees, its own or a later one
    most: int  # largest distance of that key from the query's own


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, window: Window | None = None, ahead: Ahead | None = None
) -> Tensor:
    """softmax(scores + causal) v with grouped heads, in the inputs' dtype: query [S, L, h, d], key [S, L, g, d], value
    [S, L, g, v], g dividing h -> [S, L, h * v].

    `window` restricts the keys before a query, and `ahead` adds keys after it.
    """
    length, device = query.shape[1], query.device
    window = None if window is None or window.size >= length else window
    if length <= MAX_GROUPED_LENGTH:
        bias = (
            _short_bias(length, window, query.dtype, device)
            if ahead is None
            else causal_bias(torch.arange(length, device=device), length, window, query.dtype, ahead.last)
        )
        return _grouped_products(query, key, value, bias, scores)
    if window is None and ahead is None and scores.plain:
        return _flash(query, key, value, scores.scale, is_causal=True)
    outputs = []
    for start in range(0, length, BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, length)
        first, end = 0 if window is None else max(0, window.first(start)), stop
        last = None
        if ahead is not None:
            end, last = min(stop + ahead.most, length), ahead.last[:, start:stop] - first
        own = torch.arange(start - first, stop - first, device=device)
        mask = causal_bias(own, end - first, window, query.dtype, last)
        q, k, v = query[:, start:stop], key[:, first:end], value[:, first:end]
        outputs.append(masked_attention(q, k, v, mask[None] if last is None else mask, scores))
    return torch.cat(outputs, dim=1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """softmax(scores + mask) v, in the inputs' dtype: query [S, Lq, h, d], key [S, Lk, g, d], value [S, Lk, g, v], mask
    [S or 1, Lq, Lk] -> [S, Lq, h * v].

    With capped scores or sinks the backward pass recomputes the scores in place of keeping them.
    """
    if not scores.plain:
        inputs = query, key, value, mask, scores
        return checkpoint(_grouped_products, *inputs, use_reentrant=False, preserve_rng_state=False)
    return _flash(query, key, value, scores.scale, attn_mask=mask[:, None])


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, **masking: Any) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **masking)
    return out.transpose(1, 2).flatten(2)


def causal_bias(
    own: Tensor, num_keys: int, window: Window | None, dtype: torch.dtype, last: Tensor | None = None
) -> Tensor:
    """Return [*own.shape, num_keys] in `dtype`: 0 where a query may see a key, minus infinity elsewhere. `own` is the
    index of each query's own key, and `last` [..., *own.shape] of the last one that it sees; None: its own."""
    keys = torch.arange(num_keys, device=own.device)
    hidden = keys > (own if last is None else last)[..., None]
    if window is not None:
        hidden |= keys < window.first(own)[..., None]
    return torch.zeros(hidden.shape, dtype=dtype, device=own.device).masked_fill_(hidden, float("-inf"))


@functools.lru_cache(maxsize=64)
def _short_bias(length: int, window: Window | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    return causal_bias(torch.arange(length, device=device), length, window, dtype)[None]


def _grouped_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scores: Scores) -> Tensor:
    """Compute attention with all scores in memory at once; `bias` is [S or 1, Lq, Lk].

    The r = h / g query heads of a group share one product with their key head, so keys and values are not copied.
    """
    s, queries, h, d = query.shape
    keys, g = key.shape[1:3]
    r = h // g
    q = query.reshape(s, queries, g, r, d).permute(0, 2, 3, 1, 4).reshape(s * g, r * queries, d)
    k = key.permute(0, 2, 3, 1).reshape(s * g, d, keys)
    v = value.transpose(1, 2).reshape(s * g, keys, -1)
    bias = bias.repeat(1, r, 1)
    bias = bias.expand(s * g, -1, -1) if len(bias) == 1 else bias.repeat_interleave(g, 0)
    if scores.softcap is None:
        values = torch.baddbmm(bias, q, k, alpha=scores.scale)
    else:
        values = torch.bmm(q, k).mul(scores.scale / scores.softcap).tanh().mul(scores.softcap) + bias
    if scores.sinks is not None:
        column = scores.sinks.to(q.dtype).view(g, r, 1).expand(s, g, r, queries).reshape(s * g, r * queries, 1)
        values = torch.cat([values, column], dim=-1)
    weights = torch.softmax(values, dim=-1)[..., :keys]
    return (weights @ v).view(s, g, r, queries, -1).permute(0, 3, 1, 2, 4).reshape(s, queries, -1)
