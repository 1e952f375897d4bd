"""Core attention of a context-parallel rank in plain torch: its own queries against the keys and values of all ranks.

Keys and values are all-gathered over the group, their gradients reduce-scattered to their owners. A chunk sees its
sequence up to its own end. Chunks that see a similar number of keys share a batch; a mask marks each chunk's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megagrpo.platform.parallel.context import gathered_indices
from megagrpo.policy.attention.causal import Scores, Window, causal_bias, masked_attention
from megagrpo.train_types import moved

# A batch accepts sequences of at least this share of its longest, and chunks that see at least this share of the keys
# that its first chunk sees: at most 30 % of its rows are padding.
MIN_FILL = 0.7
# A longer chunk is split: the mask of a batch grows with queries times keys, and no query sees keys after its own
# chunk.
MAX_QUERIES = 1024


@dataclass(frozen=True)
class ChunkBatch:
    """A batch of sequence chunks with the keys that they see. Padding repeats token 0."""

    queries: Tensor  # [N, Lq] int64, positions in this rank's slice
    keys: Tensor  # [N, Lk] int64, positions in gathered order; a prefix precedes the tokens that continue it
    # [N] int64, index of a chunk's first query among its keys; the query sees the keys up to and including it
    first: Tensor
    earliest: int  # the smallest of `first`
    last: Tensor | None = None  # [N, Lq] int64, index of the last key that each query sees; None: its own

    def within(self, window: Window | None) -> ChunkBatch:
        """Return the batch without the keys that no query sees through the window."""
        skipped = 0 if window is None else max(0, window.first(self.earliest))
        last = None if self.last is None else self.last - skipped
        return ChunkBatch(self.queries, self.keys[:, skipped:], self.first - skipped, self.earliest - skipped, last)

    def mask(self, window: Window | None, dtype: torch.dtype) -> Tensor:
        """Return [N, Lq, Lk] in `dtype`: 0 where a query sees a key, minus infinity elsewhere."""
        own = self.first[:, None] + torch.arange(self.queries.shape[1], device=self.queries.device)
        # The clamp lets every padding query see a key: a row without any would give the keys NaN gradients.
        own = own.clamp(max=self.keys.shape[1] - 1)
        last = None if self.last is None else torch.maximum(own, self.last)
        return causal_bias(own, self.keys.shape[1], window, dtype, last)


@dataclass(frozen=True)
class _Chunk:
    seen: int  # number of keys: prefix, tokens of the sequence up to the last one that a query sees
    first: int  # index of the first query among the keys
    count: int  # number of queries
    position: int  # position of the first query in this rank's slice
    start: int  # position of the sequence in the pack
    prefix: tuple[int, int]  # start and stop of the prefix in the pack


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSeqParams,
    group: dist.ProcessGroup,
    scores: Scores,
    window: Window | None = None,
) -> Tensor:
    """Run `causal_attention`: query [T/cp, h, d], key [T/cp, g, d], value [T/cp, g, v] -> [T/cp, h * v]. Collective."""
    batches, pack_order = context_batches(packed, group, window, query.dtype)
    assert pack_order.numel() == query.shape[0], (
        f"cu_seqlens give this rank {pack_order.numel()} tokens, the pack has {query.shape[0]}"
    )
    gathered = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=group)  # [T, g, d + v]
    outputs = []
    for batch, mask in batches:
        q = query.index_select(0, batch.queries.flatten()).view(*batch.queries.shape, *query.shape[1:])
        kv = gathered.index_select(0, batch.keys.flatten()).view(*batch.keys.shape, *gathered.shape[1:])
        k, v = kv.split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs.append(masked_attention(q, k, v, mask, scores).flatten(0, 1))
    return torch.cat(outputs).index_select(0, pack_order)


def context_batches(
    packed: PackedSeqParams, group: dist.ProcessGroup, window: Window | None, dtype: torch.dtype
) -> tuple[list[tuple[ChunkBatch, Tensor]], Tensor]:
    """Return a pack's batches, restricted to the window, with their masks in `dtype`, and `pack_order` of
    `batch_chunks`. The first layer that asks computes them; they stay on the pack for the others."""
    batches, pack_order = _batches_of(packed, group)
    return _masked(packed, batches, window, dtype), pack_order


def _batches_of(packed: PackedSeqParams, group: dist.ProcessGroup) -> tuple[list[ChunkBatch], Tensor]:
    """Return a pack's batches and `pack_order` of `batch_chunks`. They are cached on the pack."""
    if not hasattr(packed, "chunks"):
        ranks = dist.get_world_size(group), dist.get_rank(group)
        device, last_seen = packed.positions.device, packed.last_seen
        packed.chunks = batch_chunks(packed.host_borders, packed.prefixes, *ranks, device, last_seen)
        packed.masked = {}
    return packed.chunks


def _masked(
    packed: PackedSeqParams, batches: list[ChunkBatch], window: Window | None, dtype: torch.dtype
) -> list[tuple[ChunkBatch, Tensor]]:
    """Return each batch restricted to the window, with its mask. The result stays on the pack for later layers."""
    if window not in packed.masked:
        seen = [batch.within(window) for batch in batches]
        packed.masked[window] = [(batch, batch.mask(window, dtype)) for batch in seen]
    return packed.masked[window]


def batch_chunks(
    cu_seqlens: Tensor,
    prefixes: list[int] | None,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
    last_seen: Tensor | None = None,
) -> tuple[list[ChunkBatch], Tensor]:
    """Return the chunks of rank `cp_rank` in batches, and `pack_order` [T/cp] int64, both on `device`.

    `pack_order` holds the index of each of the rank's tokens among the concatenated queries of all batches.
    `cu_seqlens` [S + 1] is on the host. `prefixes` [S] holds the index of the sequence that each one continues, or -1.
    `last_seen` is as in `packed.pack_params`.
    """
    own = _own_chunks(cu_seqlens.tolist(), prefixes, cp_size, cp_rank, last_seen)
    chunks = sorted(own, key=lambda c: (-c.seen, -c.count, c.position))
    groups: list[list[_Chunk]] = []
    for chunk in chunks:
        if not groups or chunk.seen < MIN_FILL * groups[-1][0].seen:
            groups.append([])
        groups[-1].append(chunk)
    gathered = gathered_indices(cu_seqlens, cp_size)
    batches, pack_order, offset = [], torch.empty(gathered.numel() // cp_size, dtype=torch.int64), 0
    for group in groups:
        fields = zip(*((c.seen, c.first, c.count, c.position, c.start, *c.prefix) for c in group), strict=True)
        seen, first, count, position, start, before, after = (torch.tensor(values)[:, None] for values in fields)
        column = torch.arange(int(count.max()))
        queries, real = position + column, column < count
        pack_order[queries[real]] = offset + torch.arange(queries.numel()).view_as(queries)[real]
        offset += queries.numel()
        shared, last = after - before, None
        if last_seen is not None:
            last = moved(last_seen[torch.where(real, start + first - shared + column, 0)], device)
        column = torch.arange(int(seen.max()))
        keys = torch.where(column < shared, before + column, start + column - shared)
        keys = gathered[torch.where(column < seen, keys, 0)]
        rows, firsts = torch.where(real, queries, 0), moved(first[:, 0], device)
        batches.append(ChunkBatch(moved(rows, device), moved(keys, device), firsts, int(first.min()), last))
    return batches, moved(pack_order, device)


def _own_chunks(
    borders: list[int], prefixes: list[int] | None, cp_size: int, cp_rank: int, last_seen: Tensor | None
) -> list[_Chunk]:
    spans = list(pairwise(borders))
    chunks = []
    for i, (start, stop) in enumerate(spans):
        prefix = (0, 0) if prefixes is None or prefixes[i] < 0 else spans[prefixes[i]]
        size = (stop - start) // (2 * cp_size)
        for half, number in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
            for skip in range(0, size, MAX_QUERIES):
                count = min(MAX_QUERIES, size - skip)
                at = number * size + skip  # the chunk's first token in the sequence
                first = prefix[1] - prefix[0] + at
                seen = first + count
                if last_seen is not None:
                    seen = max(seen, int(last_seen[start + at : start + at + count].max()) + 1)
                chunks.append(_Chunk(seen, first, count, start // cp_size + half * size + skip, start, prefix))
    return chunks
