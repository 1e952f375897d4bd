"""Routing replay: routers take given experts, or record theirs (Zheng et al. 2025, arXiv 2507.18071, replay the
trainer's routes; Ma et al. 2025, arXiv 2510.11370, the engine's).

A replayed router computes its scores from the hidden states as usual, and takes the scores of the given experts in
place of the highest ones. Gradients therefore reach the router. Megatron's RouterReplay keeps one list of layers for
the process; here each router has its own slot, and routes travel with their micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.moe.rank_routed_experts import rank_columns
from megagrpo.policy.moe.router_losses import routers
from megagrpo.train_types import AGREEMENT, Metric, TrainBatch

Select = Callable[..., tuple[Tensor, Tensor]]  # (scores [tokens, E], k, ...) -> scores and experts [tokens, k]


class RouteSlot:
    """What a router asks for the experts of its tokens, through the hook that Megatron has for replayed routes.

    A layer inside an activation checkpoint runs twice: in the forward pass without gradients, then in the backward
    pass. Its second run takes the routes of the first. In every pipeline schedule a model chunk runs its micro-batches
    backward in the order of their forward passes, so a queue is enough.
    """

    def __init__(self, column: int, select: Select | None):
        """`column` is the layer's index among this rank's layers with experts. `select` replaces the choice of the
        highest scores, for experts in groups."""
        self.column, self._select = column, select
        self.given: Tensor | None = None  # [tokens, k], of the forward pass in progress
        self.counted: Tensor | None = None  # [tokens] bool, of the forward pass in progress: tokens to compare
        self.recorded: Tensor | None = None  # [tokens, k] of the last pass that chose by scores
        self.agreement = torch.zeros(2, dtype=torch.int64)  # experts of counted tokens that the scores choose too, all
        self.trains = False  # whether a backward pass follows, in which checkpoints run layers again
        # whether a micro-batch of this pass has routes: then all have, and runs without are errors
        self.replays = False
        self.to_recompute: deque[Tensor] = deque()

    @contextmanager
    def using(self, given: Tensor | None, counted: Tensor | None) -> Iterator[None]:
        """Context manager of the layer's forward pass over a micro-batch with the routes `given` and the tokens
        `counted`."""
        self.given, self.counted = given, counted
        try:
            yield
        finally:
            self.given = self.counted = None

    def get_replay_topk(self, scores: Tensor, topk: int, *groups: Any) -> tuple[Tensor, Tensor]:
        """Return (scores, experts) [tokens, k] from scores [tokens, E]. `groups` ends with Megatron's own choice."""
        select = self._select or groups[-1]
        if self.given is not None:
            given = self.given
            # gather and scatter would leave tokens without routes out silently
            if given.shape != (scores.shape[0], topk):
                raise ValueError(f"routes {list(given.shape)} for {scores.shape[0]} tokens with {topk} experts each")
            if self.trains and not torch.is_grad_enabled():
                self.to_recompute.append(given)
            if self.trains and self.counted is not None:
                chosen = select(scores.detach(), topk, *groups[:-1])[1]
                same = (chosen[:, :, None] == given[:, None, :]).any(-1) & self.counted[:, None]
                self.agreement += torch.stack([same.sum(), topk * self.counted.sum()])
        elif self.to_recompute:
            given = self.to_recompute.popleft()
        elif self.replays:
            raise RuntimeError("routing replay: a layer ran again more often than its routes were kept")
        else:
            values, self.recorded = select(scores, topk, *groups[:-1])
            return values, self.recorded
        experts = given.long()
        return scores.gather(1, experts), experts


def later(router: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes context managers, in which `router` replays the routes of the forward pass in progress now."""
    slot = router.router_replay
    return partial(slot.using, slot.given, slot.counted) if isinstance(slot, RouteSlot) else nullcontext


def route_shape(hf_config: HfConfig) -> RouteShape:
    """Return the shape of the routes of a model with experts."""
    experts = hf_config.mixture
    return RouteShape(tuple(sorted(experts.blocks)), hf_config.num_layers, experts.count, experts.per_token)


class RoutingReplay:
    """The routers of this rank's bare chunks, each with its own slot.

    Routes of a rank are [tokens, M, k]: the tokens that its layers compute, and its M layers with experts in order.
    """

    def __init__(self, chunks: Sequence[nn.Module], hf_config: HfConfig):
        self._shape = route_shape(hf_config)
        self._dtype = torch.from_numpy(np.zeros(0, self._shape.dtype)).dtype
        self._slots: list[RouteSlot] = []
        self._of_chunk: dict[int, list[RouteSlot]] = {}  # by the chunk's id
        self._recorded: dict[int, list[Tensor]] | None = None  # by the chunk's id: routes of each micro-batch
        for chunk in chunks:
            for router in routers([chunk]):
                groups = router.router_replay
                router.router_replay = RouteSlot(len(self._slots), groups and groups.get_replay_topk)
                self._slots.append(router.router_replay)
            self._of_chunk[id(chunk)] = [router.router_replay for router in routers([chunk])]

    @contextmanager
    def passing(self, trains: bool) -> Iterator[None]:
        """Context manager of one pass over micro-batches; with `trains` a backward pass is part of it.

        Raises RuntimeError if a layer inside an activation checkpoint did not run again.
        """
        for slot in self._slots:
            slot.trains, slot.replays = trains, False
            slot.agreement = torch.zeros(2, dtype=torch.int64, device=device.device())
        left = 0
        try:
            yield
            left = sum(len(slot.to_recompute) for slot in self._slots)
        finally:
            for slot in self._slots:
                slot.to_recompute.clear()
        if left:
            raise RuntimeError(f"routing replay: {left} forward passes of layers were not recomputed")

    @contextmanager
    def forward(self, model: nn.Module, routes: Tensor | None, counted: Tensor | None) -> Iterator[None]:
        """Context manager of a chunk's forward pass over a micro-batch with these `routes` of the rank; None: routers
        choose. Routes of tokens that are `counted` [tokens] bool are compared with the routers' own choice."""
        chunk = id(unwrap_model(model))
        slots = self._of_chunk.get(chunk, [])
        with ExitStack() as stack:
            for slot in slots:
                slot.replays = routes is not None
                stack.enter_context(slot.using(None if routes is None else routes[:, slot.column], counted))
            yield
        if self._recorded is not None:
            taken = [slot.recorded for slot in slots if slot.recorded is not None]
            if taken:  # a chunk may have no layer with experts
                self._recorded[chunk].append(torch.stack(taken, dim=1).to(self._dtype))

    def recorded(self, batch: TrainBatch, logprobs: Callable[[TrainBatch], list[Tensor | None]]) -> TrainBatch:
        """Return the batch with `logprobs(batch)`, one pass over it without routes, as its old log-probs, and with the
        routes that the routers took in this pass. They stay on the device."""
        self._recorded = {chunk: [] for chunk in self._of_chunk}
        try:
            batch = batch.with_terms(old_logprobs=logprobs(batch))
            parts = [rows for rows in self._recorded.values() if rows]
        finally:
            self._recorded = None
        routes = [torch.cat(chunks, dim=1) for chunks in zip(*parts, strict=True)]
        return batch.with_routes(routes) if routes else batch  # a rank may have no layer with experts

    def metrics(self, layout: Layout) -> dict[str, Metric]:
        """Return the share of the given experts of counted tokens that the routers would have chosen too, in the last
        pass: over all layers, by layer, and the smallest of a layer. Collective; empty if no token had routes.
        """
        layers, parallel = self._shape.layers, layout.parallel
        counts = torch.zeros(len(layers), 2, dtype=torch.float64)  # experts that the scores choose too, all
        # without sequence parallelism the tensor-parallel ranks have the same tokens
        if self._slots and (parallel.sequence_parallel or layout.tp_rank == 0):
            own = torch.stack([slot.agreement for slot in self._slots])
            counts[rank_columns(self._shape, parallel, layout.pp_rank)] = own.cpu().double()
        counts = layout.all_reduce(counts)
        (same, total), by_layer = counts.sum(0).tolist(), counts.tolist()
        if not total:
            return {}
        lowest = min(agreed / counted for agreed, counted in by_layer)
        shares = {f"{AGREEMENT}/{layer}": Metric(*pair) for layer, pair in zip(layers, by_layer, strict=True)}
        return {AGREEMENT: Metric(same, total), f"{AGREEMENT}_min": Metric(lowest, total, "min")} | shares


class NoReplay(RoutingReplay):
    """Leaves all routers as they are."""

    def __init__(self) -> None:
        self._slots, self._of_chunk, self._recorded = [], {}, None

    def metrics(self, layout: Layout) -> dict[str, Metric]:
        """Return nothing, without a message."""
        return {}


NO_REPLAY = NoReplay()
