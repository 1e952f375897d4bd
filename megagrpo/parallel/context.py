"""Context parallelism: the tokens of a pack that each rank holds, and the gather of the ranks' rows into whole rows.

Every sequence of a pack is split into 2 cp chunks of equal length. Rank r holds chunks r and 2 cp - 1 - r of each sequence. One of them
sees few tokens before it and the other many, so causal attention costs every rank the same. Transformer Engine expects this order for
packed sequences. A rank's slice holds its chunks sequence after sequence; "gathered" order is the concatenation of all ranks' slices.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable


def own_tokens(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return [T/cp] int64: the pack positions of the tokens that rank `cp_rank` holds, in the order of its slice.

    `cu_seqlens` [S + 1] int32 are the borders of the sequences, whose lengths must be multiples of 2 cp. With one rank: 0 to T - 1.
    """
    lengths, device = cu_seqlens.diff().long(), cu_seqlens.device
    if cp_size == 1:
        return torch.arange(int(cu_seqlens[-1]), device=device)
    assert not (lengths % (2 * cp_size)).any(), f"sequences of {lengths.tolist()} tokens cannot be cut into {2 * cp_size} chunks"
    chunks = (lengths // (2 * cp_size)).repeat_interleave(lengths // cp_size)  # [T/cp], chunk length of the token's sequence
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths // cp_size)
    offset = torch.arange(chunks.numel(), device=device) - starts // cp_size  # index within the two chunks of the sequence
    early = cp_rank * chunks + offset
    late = (2 * cp_size - 1 - cp_rank) * chunks + offset - chunks
    return starts + torch.where(offset < chunks, early, late)


def gathered_places(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Return [T] int64: for each token of the pack its index in gathered order. Gathered rows indexed by it are in pack order."""
    order = torch.cat([own_tokens(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return places


def gather_rows(rows: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the slices [..., T/cp] of the ranks of `group` into [..., T] in pack order, on every rank, in the same dtype.

    Differentiable: a rank's gradient is its own part of the whole's. The gradient is not summed over ranks, because every rank computes
    the same loss from the same whole.
    """
    return rows if dist.get_world_size(group) == 1 else _GatherRows.apply(rows, cu_seqlens, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        ctx.save_for_backward(own_tokens(cu_seqlens, size, rank))
        slices = [torch.empty_like(rows) for _ in range(size)]
        dist.all_gather(slices, rows.contiguous(), group=group)
        return torch.cat(slices, dim=-1).index_select(-1, gathered_places(cu_seqlens, size))

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor, None, None]:
        (own,) = ctx.saved_tensors
        return grad.index_select(-1, own), None, None
