"""The way of the routes: from the leader that sampled them to the ranks that replay them.

Routes go from leader to leader as tokens do (`token_exchange.py`). The leader of a replica then sends each of its ranks
only the routes of the tokens and layers that this rank computes: a pipeline stage gets its layers, a context-parallel
rank its slices of the sequences, and with sequence parallelism a tensor-parallel rank its part of these. Every rank
knows the packing, so no sizes travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch

from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.data.packing.sample_packing import PackPlan
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.bulk_messages import begin_send, receive, wait
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.moe.rank_routed_experts import RankTokens, rank_columns, with_rank_routes
from megagrpo.train_types import TrainBatch
from megagrpo.trainer.rollout.token_exchange import ROUND_WORDS, Travel, trained_by
from megagrpo.types import Rollout, Routes

WORD = 4  # bytes


def replayed_batches(
    batches: Sequence[TrainBatch],
    samples: StepSamples,
    plans: Sequence[PackPlan],
    layout: Layout,
    shape: RouteShape,
    round_words: int = ROUND_WORDS,
) -> list[TrainBatch]:
    """Return the step's batches of this replica with the engine's routes of the tokens and layers of this rank.
    Collective.

    Raises ValueError on the rank of a sample without routes, and RankError on all other ranks.
    """
    lengths = samples.facts["length"].astype(np.int64)
    run_own_and_agree(layout, lambda: _check(samples, shape))
    delivery = _Delivery(batches, lengths, layout, shape)
    words = (lengths - 1) * _words_per_token(shape)
    travel = Travel(samples, trained_by(plans, len(samples), layout.dp_size), layout, round_words)
    for chosen, table in travel.tables(words, lambda scored: _route_row(scored.rollout, shape)):
        delivery.deliver(chosen, None if table is None else _table_rows(table, shape))
    return with_rank_routes(batches, delivery.tokens[delivery.own], delivery.routes)


class _Delivery:
    """What each rank of this replica replays. The leader knows it of all ranks, the others of themselves.

    A rank is known by its coordinates (cp rank, tp rank, pipeline stage).
    """

    def __init__(self, batches: Sequence[TrainBatch], lengths: np.ndarray, layout: Layout, shape: RouteShape):
        p = layout.parallel
        self._lengths, self._layout = lengths, layout
        self.own = layout.cp_rank, layout.tp_rank
        pairs = list(product(range(p.cp), range(p.tp))) if layout.is_dp_leader else [self.own]
        micro_batches = [m for batch in batches for m in batch.micro_batches]
        self.tokens = {pair: RankTokens.of(micro_batches, p, *pair) for pair in pairs}
        self._columns = [rank_columns(shape, p, stage) for stage in range(p.pp)]
        self.routes = shape.filler(self.tokens[self.own].positions, len(self._columns[layout.pp_rank]))

    def deliver(self, chosen: np.ndarray, rows: Routes | None) -> None:
        """Take this rank's routes out of `rows` [n, M, k], which the leader has: the routes of the samples `chosen`
        one after the other. Other ranks get theirs from the leader."""
        layout, counts = self._layout, self._lengths[chosen] - 1
        starts = np.full(self._lengths.size + 1, -1)  # row of the sample's first token; -1: not here, or padding
        starts[chosen] = counts.cumsum() - counts
        sent = []
        for pair, tokens in self.tokens.items():
            places = np.flatnonzero(tokens.have_routes(self._lengths) & (starts[tokens.samples] >= 0))
            wanted = starts[tokens.samples[places]] + tokens.positions[places]
            for stage, columns in enumerate(self._columns):
                rank = layout.leader_of(layout.dp_rank, stage) + pair[0] * layout.parallel.tp + pair[1]
                if not (places.size and columns):
                    continue
                if rank == layout.world_rank:
                    self.routes[places] = self._received(places) if rows is None else rows[wanted][:, columns]
                elif rows is not None:
                    table = torch.from_numpy(np.ascontiguousarray(rows[wanted][:, columns])).view(torch.uint8)
                    sent.append(begin_send(table, rank, layout.replica))
        wait(sent)

    def _received(self, places: np.ndarray) -> Routes:
        routes, leader = np.empty_like(self.routes[places]), self._layout.leader_of(self._layout.dp_rank)
        receive(torch.from_numpy(routes).view(torch.uint8), leader, self._layout.replica)
        return routes


def _check(samples: StepSamples, shape: RouteShape) -> None:
    """Raise ValueError if a token before the last written one of a rollout of this rank has no route."""
    for index, scored in samples.own.items():
        rollout = scored.rollout
        needed = len(rollout.prompt.token_ids) + int(np.flatnonzero(rollout.written).max(initial=-1))
        known = 0 if rollout.routes is None else len(rollout.routes)
        if known < needed:
            raise ValueError(
                f"rollout.routing_replay: sample {index} (prompt {rollout.prompt.prompt_id}) has no route for token "
                f"{known} in layer {shape.layers[0]}, and {needed} of its tokens need one; set it to off, or resume a "
                "checkpoint of a run with routing_replay engine"
            )


def _words_per_token(shape: RouteShape) -> int:
    return -(-shape.bytes_per_token // WORD)


def _route_row(rollout: Rollout, shape: RouteShape) -> np.ndarray:
    """Return the routes of all tokens but the last as words, each token's padded to whole words. Tokens after the last
    one that the engine read get fillers."""
    count = len(rollout.prompt.token_ids) + len(rollout.response_ids) - 1
    known = shape.filler(np.arange(count), len(shape.layers))
    if rollout.routes is not None:
        known[: len(rollout.routes)] = rollout.routes[:count]
    row = np.zeros((count, _words_per_token(shape) * WORD // shape.dtype.itemsize), shape.dtype)
    row[:, : len(shape.layers) * shape.per_token] = known.reshape(count, -1)
    return row.view(np.int32).reshape(-1)


def _table_rows(table: np.ndarray, shape: RouteShape) -> Routes:
    """Return the routes [n, M, k] of a table of `_route_row` words."""
    rows = table.reshape(-1, _words_per_token(shape)).view(shape.dtype)
    return rows[:, : len(shape.layers) * shape.per_token].reshape(len(rows), len(shape.layers), shape.per_token)
