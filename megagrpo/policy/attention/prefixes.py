"""Transformer Engine's attention for packs whose sequences continue others, as responses continue one copy of their
prompt.

A query sees the keys of its prefix and those of its own sequence. Keys and values are therefore repeated per sequence,
prefix first, and each causal mask ends at its sequence's last key (bottom right). cuDNN and FlashAttention have both.
Only queries are shared: attention's products for a prefix run once.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable

from megagrpo.train_types import moved


class PackedMask(enum.Enum):
    """A mask of Transformer Engine that megatron-core's `AttnMaskType` lacks; its name is the argument."""

    padding_causal_bottom_right = 1


def seen_keys(borders: Tensor, prefixes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pack positions [K] int64 of the keys that each sequence sees, sequence after sequence, and their
    borders [S + 1] int32.

    `borders` [S + 1] are the sequences' borders, `prefixes` [S] int64 the index of the sequence that each continues, or
    -1; all are on the host.
    """
    starts, lengths = borders[:-1].long(), borders.diff().long()
    before = torch.where(prefixes < 0, 0, lengths[prefixes.clamp(min=0)])
    counts = before + lengths
    stops = counts.cumsum(0)
    column = torch.arange(int(stops[-1])) - (stops - counts).repeat_interleave(counts)
    in_prefix = column < before.repeat_interleave(counts)
    of_prefix = starts[prefixes.clamp(min=0)].repeat_interleave(counts) + column
    of_own = (starts - before).repeat_interleave(counts) + column
    return torch.where(in_prefix, of_prefix, of_own), torch.nn.functional.pad(stops, (1, 0)).int()


class _RepeatRows(torch.autograd.Function):
    """rows[index]: [T, ...] -> [K, ...]. The gradients of a row's copies are added in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.count, *grad.shape[1:], dtype=wide).index_add_(0, index, grad.to(wide))
        return total.to(grad.dtype), None


def _repeated(packed: PackedSeqParams) -> tuple[Tensor, PackedSeqParams]:
    """Return the key positions of a pack, on its device, and its description for Transformer Engine. The first layer
    that asks computes them; they stay on the pack for the others."""
    if not hasattr(packed, "repeated"):
        index, borders = seen_keys(packed.host_borders, torch.tensor(packed.prefixes))
        device = packed.positions.device
        described = replace(
            packed,
            cu_seqlens_kv=moved(borders, device),
            max_seqlen_q=int(packed.host_borders.diff().max()),
            max_seqlen_kv=int(borders.diff().max()),
        )
        packed.repeated = moved(index, device), described
    return packed.repeated


@functools.cache
def prefixed(base: Any) -> Any:
    """Return a subclass of `base`, Transformer Engine's attention, for packs with and without prefixes. It runs within
    one context-parallel rank only: Transformer Engine's ring has no such mask."""

    class Prefixed(base):
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any,
            *args: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **kwargs: Any,
        ) -> Tensor:
            """Return the attention [T, h * v] of query [T, h, d], key [T, g, d] and value [T, g, v]."""
            if packed_seq_params is not None and packed_seq_params.prefixes is not None:
                index, packed_seq_params = _repeated(packed_seq_params)
                key, value = _RepeatRows.apply(key, index), _RepeatRows.apply(value, index)
                attn_mask_type = PackedMask.padding_causal_bottom_right
            kwargs["packed_seq_params"] = packed_seq_params
            return super().forward(query, key, value, attention_mask, attn_mask_type, *args, **kwargs)

    return Prefixed
