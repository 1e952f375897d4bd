"""Context parallelism: the tokens of a pack that each rank holds, and the gather of the ranks' rows into whole rows.

Every sequence of a pack is split into 2 cp chunks of equal length. Rank r holds chunks r and 2 cp - 1 - r of each
sequence. One of them sees few tokens before it and the other many, so causal attention costs every rank the same.
Transformer Engine expects this order for packed sequences. A rank's slice holds its chunks sequence after sequence;
"gathered" order is the concatenation of all ranks' slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from megagrpo.train_types import MicroBatch, moved


def rank_indices(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return [T/cp] int64: the pack positions of the tokens that rank `cp_rank` holds, in the order of its slice.

    `cu_seqlens` [S + 1] int32 are the borders of the sequences, on the host. With more than one rank their lengths must
    be multiples of 2 cp. With one rank: 0 to T - 1.
    """
    lengths = cu_seqlens.diff().long()
    if cp_size == 1:
        return torch.arange(int(cu_seqlens[-1]))
    assert not (lengths % (2 * cp_size)).any(), (
        f"sequences of {lengths.tolist()} tokens cannot be cut into {2 * cp_size} chunks"
    )
    # [T/cp], chunk length of the token's sequence
    chunks = (lengths // (2 * cp_size)).repeat_interleave(lengths // cp_size)
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths // cp_size)
    offset = torch.arange(chunks.numel()) - starts // cp_size  # index within the two chunks of the sequence
    early = cp_rank * chunks + offset
    late = (2 * cp_size - 1 - cp_rank) * chunks + offset - chunks
    return starts + torch.where(offset < chunks, early, late)


def gathered_indices(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Return [T] int64: each pack token's index in gathered order. Gathered rows indexed by it are in pack order."""
    order = torch.cat([rank_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    pack_order = torch.empty_like(order)
    pack_order[order] = torch.arange(order.numel())
    return pack_order


@dataclass(frozen=True)
class RankBatch:
    """A micro-batch on a rank's device, with the indices of the tokens that this context-parallel rank computes.

    All indices are computed on the host, so that a GPU's host never waits for them.
    """

    micro_batch: MicroBatch
    indices: Tensor  # [T/cp] int64, `rank_indices` of the rank
    loss: Tensor  # [N] int64, indices of the loss tokens in `indices`
    pack_order: Tensor | None  # [T] int64, `gathered_indices`; None with one rank
    on_host: MicroBatch  # the same micro-batch
    on_host_tokens: Tensor  # [N] int64, pack positions of the loss tokens

    @classmethod
    def of(cls, micro_batch: MicroBatch, cp_size: int, cp_rank: int, device: torch.device) -> RankBatch:
        """Move a micro-batch of the host to `device`, without waiting for the transfer."""
        indices = rank_indices(micro_batch.cu_seqlens, cp_size, cp_rank)
        loss = micro_batch.loss_mask[indices].nonzero()[:, 0]
        pack_order = moved(gathered_indices(micro_batch.cu_seqlens, cp_size), device) if cp_size > 1 else None
        on_host = micro_batch, indices[loss]
        return cls(micro_batch.to(device), moved(indices, device), moved(loss, device), pack_order, *on_host)


def gather_rows(rows: Tensor, indices: Tensor, pack_order: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """All-gather the slices [..., T/cp] of `group`'s ranks into [..., T] in pack order on all ranks, in their dtype.

    `indices` and `pack_order` are this rank's, from its `RankBatch`.

    Differentiable: a rank's gradient is its own part of the whole's. The gradient is not summed over ranks, because
    every rank computes the same loss from the same whole.
    """
    return rows if pack_order is None else _GatherRows.apply(rows, indices, pack_order, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, indices: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(indices)
        slices = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(slices, rows.contiguous(), group=group)
        return torch.cat(slices, dim=-1).index_select(-1, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return grad.index_select(-1, indices), None, None, None
