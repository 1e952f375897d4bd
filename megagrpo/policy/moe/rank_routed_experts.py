"""Which routes a rank replays: those of the tokens that its layers compute, in its own layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megagrpo.config import ParallelSection
from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.families.hf_config import stage_layers
from megagrpo.platform.parallel.context import rank_indices
from megagrpo.platform.parallel.layout import Layout
from megagrpo.train_types import MicroBatch, TrainBatch
from megagrpo.types import Routes


@dataclass(frozen=True)
class RankTokens:
    """The n tokens that a rank's layers compute in a list of micro-batches, in order: under context parallelism its
    part of each sequence, under sequence parallelism its part of that."""

    samples: np.ndarray  # [n] int64, index of the token's sample; -1 for padding
    positions: np.ndarray  # [n] int64, position in the sample
    borders: np.ndarray  # [B + 1] int64, where the tokens of each micro-batch begin

    @classmethod
    def of(
        cls, micro_batches: Sequence[MicroBatch], parallel: ParallelSection, cp_rank: int, tp_rank: int
    ) -> RankTokens:
        """Return the tokens of the ranks with these coordinates. The micro-batches are on the host."""
        samples, positions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for m in micro_batches:
            own = rank_indices(m.cu_seqlens, parallel.cp, cp_rank)
            own = own.chunk(parallel.tp)[tp_rank] if parallel.sequence_parallel else own
            samples.append(m.samples[m.sequence_index[own]].numpy())
            positions.append(m.position_ids[own].numpy())
        borders = np.cumsum([rows.size for rows in samples])
        return cls(np.concatenate(samples), np.concatenate(positions), borders)

    def have_routes(self, lengths: np.ndarray) -> np.ndarray:
        """[n] bool: whether the token has a route. Padding and the last token of a sample have none. `lengths` [N] are
        the tokens of each sample."""
        return (self.samples >= 0) & (self.positions < lengths[self.samples] - 1)


def rank_columns(shape: RouteShape, parallel: ParallelSection, pp_rank: int) -> list[int]:
    """Return the indices in `shape.layers` of the layers that a pipeline stage's ranks have, in their order."""
    counts = stage_layers(shape.num_layers, parallel)
    ends = np.cumsum(counts)
    stages = range(pp_rank, len(counts), parallel.pp)  # one for each virtual stage
    return [
        column
        for stage in stages
        for column, layer in enumerate(shape.layers)
        if ends[stage] - counts[stage] <= layer < ends[stage]
    ]


def with_rank_routes(batches: Sequence[TrainBatch], tokens: RankTokens, routes: Routes) -> list[TrainBatch]:
    """Return the batches with the routes [n, M, k] of their micro-batches' tokens, in the order of `tokens`."""
    parts = iter(np.split(routes, tokens.borders[1:-1]))
    return [batch.with_routes([torch.from_numpy(next(parts)) for _ in batch.micro_batches]) for batch in batches]


def with_sample_routes(
    batch: TrainBatch, routes: Mapping[int, Routes], layout: Layout, shape: RouteShape
) -> TrainBatch:
    """Return the batch with routes, from those [L - 1, M, k] of all its samples, by index, at hand on this rank."""
    tokens = RankTokens.of(batch.micro_batches, layout.parallel, layout.cp_rank, layout.tp_rank)
    columns = rank_columns(shape, layout.parallel, layout.pp_rank)
    rows = shape.filler(tokens.positions, len(columns))
    for index, known in routes.items():
        own = np.flatnonzero((tokens.samples == index) & (tokens.positions < len(known)))
        rows[own] = known[tokens.positions[own]][:, columns]
    return with_rank_routes([batch], tokens, rows)[0]
