"""Whole sequences for recurrent parts: from a pack, whose tokens context-parallel ranks share, and back to it.

Under context parallelism the ranks exchange tokens for heads: each rank computes whole sequences for its heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup

from megagrpo.platform.parallel.context import gathered_indices
from megagrpo.policy.attention.packed import batches_of
from megagrpo.train_types import moved

CHUNK = 64  # tokens of a sequence whose mutual effects are computed as one matrix


def over_sequences(
    mix: Callable[[Tensor], Tensor], features: Tensor, packed: PackedSeqParams, group: ProcessGroup
) -> Tensor:
    """Return [T/cp, values of all heads] of `features` [T/cp, cp, width], those of the heads of each rank of `group`.

    `mix` returns [S, L, values of this rank's heads] of the features [S, L, width] of right-padded sequences.
    """
    cp_size, rows = group.size(), features.transpose(0, 1).flatten(0, 1)
    if cp_size > 1:
        rows = all_to_all(group, rows.contiguous()).index_select(0, _pack_order(packed, cp_size))
    batches, outputs = batches_of(packed), []
    for indices in batches.rows:
        batch = rows.index_select(0, indices.flatten()).view(*indices.shape, -1)
        outputs.append(mix(batch).flatten(0, 1))
    mixed = torch.cat(outputs).index_select(0, batches.pack_order)
    if cp_size == 1:
        return mixed
    mixed = torch.empty_like(mixed).index_copy(0, _pack_order(packed, cp_size), mixed)  # rank after rank
    return all_to_all(group, mixed).view(cp_size, -1, mixed.shape[-1]).transpose(0, 1).flatten(1)


def _pack_order(packed: PackedSeqParams, cp_size: int) -> Tensor:
    """Return [T] int64: each pack token's index among the gathered tokens of all ranks, cached on the pack."""
    if not hasattr(packed, "gathered"):
        packed.gathered = moved(gathered_indices(packed.host_borders, cp_size), packed.positions.device)
    return packed.gathered
