"""The plan of a `p2p` weight sync as data: each row sends one slice of a tensor from a rank to a worker. No tensors, no
communication.

Both sides use boxes of Hugging Face tensors: a trainer rank holds boxes (its blocks), and a worker wants boxes (the
slices its loaders copy). The plan gives every worker each wanted element exactly once, from a rank that holds it. Where
several ranks hold a slice, `choose_sources` chooses one of them, with all workers in view. With these choices any
process computes its own part of the plan from the boxes of its own tensors.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megagrpo.families.shared.boxes import Box, size
from megagrpo.weights.slices.box_slices import cover

# tensor -> box -> the ranks that hold the box, or the workers that want it
BoxMap = Mapping[str, Mapping[Box, Sequence[int]]]
# ranks that hold slices, where they are several -> (worker, layer) -> the rank that sends them
Sources = Mapping[tuple[int, ...], Mapping[tuple[int, int], int]]
# elements; a smaller message costs more to start than to send, so its slices join another message of the same pair
SMALL = 2**19

UNKNOWN = -2  # the source of slices that another process plans


@dataclass(frozen=True)
class Transfers:
    """One row per slice sent: `boxes[box]` of `names[tensor]`, from rank `source` to worker `destination`.

    A message holds all slices of one layer from one source to one destination; `messages.rounds` cuts it where it
    exceeds the size limit. Tensors outside of all layers count as one more layer.
    """

    names: tuple[str, ...]
    boxes: tuple[Box, ...]
    tensor: np.ndarray  # [n] int64, index into `names`; the arrays below are [n] int64 too
    box: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    elements: np.ndarray

    @property
    def total(self) -> int:
        """Number of elements sent."""
        return int(self.elements.sum())

    def sent(self, num_sources: int) -> np.ndarray:
        """Return the elements that each source sends, [num_sources] int64."""
        return _totals(self.source, self.elements, num_sources)

    def received(self, num_destinations: int) -> np.ndarray:
        """Return the elements that each destination receives, [num_destinations] int64."""
        return _totals(self.destination, self.elements, num_destinations)

    def links(self) -> dict[tuple[int, int], int]:
        """Return (source, destination) -> elements, for the pairs that exchange any."""
        sources, destinations, elements = self.messages
        pairs, totals = _grouped(sources << 32 | destinations, elements)
        return {(int(pair >> 32), int(pair & 0xFFFFFFFF)): int(n) for pair, n in zip(pairs, totals, strict=True)}

    @cached_property
    def messages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, destination, elements) of each message, three arrays [messages] int64."""
        layers = np.array([layer_of(name) + 1 for name in self.names], dtype=np.int64)
        # one integer per message: source, 20 bits of destination, 20 bits of layer
        keys, totals = _grouped(self.source << 40 | self.destination << 20 | layers[self.tensor], self.elements)
        return keys >> 40, keys >> 20 & 0xFFFFF, totals


def plan_transfers(holders: BoxMap, wanted: BoxMap, sources: Sources | None = None) -> Transfers:
    """Return the transfers of every slice that a worker wants, for every tensor in `wanted`.

    `sources` are the choices of `choose_sources`, made here by default. Slices without a choice come from UNKNOWN.
    Raises LookupError, with tensor and box, when no rank holds a wanted box.
    """
    pieces = _pieces(holders, wanted)
    layers = [layer_of(name) for name in wanted]
    chosen = _choose(pieces, layers) if sources is None else sources
    boxes: dict[Box, int] = {}
    rows = (
        (tensor, boxes.setdefault(part, len(boxes)), count, len(workers), ranks[0] if len(ranks) == 1 else -1)
        for tensor, part, count, ranks, workers in pieces
    )
    table = np.fromiter((value for row in rows for value in row), dtype=np.int64).reshape(-1, 5)
    tensor, box, elements, source = (np.repeat(table[:, column], table[:, 3]) for column in (0, 1, 2, 4))
    source[source < 0] = [
        of_ranks.get((worker, layers[index]), UNKNOWN)
        for index, _, _, ranks, workers in pieces
        if len(ranks) > 1
        for of_ranks in [chosen.get(ranks, {})]  # a hash of many ranks takes long
        for worker in workers
    ]
    destination = np.fromiter(
        (worker for *_, workers in pieces for worker in workers), dtype=np.int64, count=len(source)
    )
    return Transfers(tuple(wanted), tuple(boxes), tensor, box, source, destination, elements)


def choose_sources(holders: BoxMap, wanted: BoxMap) -> Sources:
    """Choose the rank that sends each slice that several ranks hold.

    Slices are grouped by holders, worker and layer. Groups with fewer replicas, then larger ones, are assigned first,
    each to the replica that sends the least so far, slices with one holder included. A small group joins an existing
    message, if any. Raises LookupError, with tensor and box, when no rank holds a wanted box.
    """
    return _choose(_pieces(holders, wanted), [layer_of(name) for name in wanted])


def layer_of(name: str) -> int:
    """Return the index of the decoder layer of a tensor, or -1 for a tensor outside of all layers."""
    return next((int(word) for word in name.split(".") if word.isdigit()), -1)


# tensor index, part, elements, ranks that hold it, workers that want it
Piece = tuple[int, Box, int, tuple[int, ...], tuple[int, ...]]


def _pieces(holders: BoxMap, wanted: BoxMap) -> list[Piece]:
    """Cut every wanted box along the blocks that hold it. Tensors of the same shape and layout share cached cuts."""
    cuts: dict[tuple[Box, tuple[Box, ...]], list[tuple[int, Box, int]]] = {}
    pieces: list[Piece] = []
    for number, (name, wants) in enumerate(wanted.items()):
        ranks_of = holders.get(name, {})
        blocks, ranks = tuple(ranks_of), [tuple(group) for group in ranks_of.values()]
        for box, workers in wants.items():
            if (box, blocks) not in cuts:
                try:
                    parts = cover(box, blocks)
                except LookupError as error:
                    raise LookupError(f"{name}: {error}") from None
                cuts[box, blocks] = [(index, part, size(part)) for index, part in parts]
            pieces += [(number, part, count, ranks[index], tuple(workers)) for index, part, count in cuts[box, blocks]]
    return pieces


def _choose(pieces: list[Piece], layers: Sequence[int]) -> Sources:
    # Sets of ranks and of workers are numbered, because a hash of a thousand numbers takes long.
    rank_sets: dict[tuple[int, ...], int] = {}
    worker_sets: dict[tuple[int, ...], int] = {}
    load: Counter[int] = Counter()
    sending: dict[tuple[int, int], set[int]] = defaultdict(set)  # (layer, worker set) -> ranks that send it a message
    groups: Counter[tuple[int, int, int]] = Counter()  # (rank set, worker, layer) -> elements
    for tensor, _, count, ranks, workers in pieces:
        if len(ranks) == 1:
            load[ranks[0]] += count * len(workers)
            sending[layers[tensor], worker_sets.setdefault(workers, len(worker_sets))].add(ranks[0])
        else:
            number = rank_sets.setdefault(ranks, len(rank_sets))
            for worker in workers:
                groups[number, worker, layers[tensor]] += count
    sharing: dict[int, list[int]] = defaultdict(list)  # worker -> sets of workers, itself included, of the same slice
    for workers, number in worker_sets.items():
        for worker in workers:
            sharing[worker].append(number)
    everyone = [(ranks, frozenset(ranks)) for ranks in rank_sets]
    # (elements, rank); elements may be outdated
    heaps = [[(-1, rank) for rank in sorted(ranks)] for ranks in rank_sets]
    chosen: dict[tuple[int, ...], dict[tuple[int, int], int]] = {ranks: {} for ranks in rank_sets}
    joined: dict[tuple[int, int], set[int]] = defaultdict(set)  # (layer, worker) -> ranks chosen to send it a message
    # stable: ties stay in order
    for (number, worker, layer), count in sorted(
        groups.items(), key=lambda item: (len(everyone[item[0][0]][0]), -item[1])
    ):
        ranks, members = everyone[number]
        preferred: list[int] = []
        if count <= SMALL:
            senders = joined[layer, worker].union(*(sending.get((layer, other), ()) for other in sharing[worker]))
            preferred = [rank for rank in senders if rank in members]
        source = (
            min(preferred, key=lambda rank: (load[rank], rank)) if preferred else _least_loaded(heaps[number], load)
        )
        chosen[ranks][worker, layer] = source
        load[source] += count
        joined[layer, worker].add(source)
    return chosen


def _least_loaded(heap: list[tuple[int, int]], load: Mapping[int, int]) -> int:
    """Return the first of the ranks in `heap` that send least. Loads only grow, so a current top is the smallest."""
    while heap[0][0] != load[heap[0][1]]:
        heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
    return heap[0][1]


def _totals(index: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """Return the sum of `counts` [n] for each value of `index` [n] below `size`: [size] int64."""
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, index, counts)
    return totals


def _grouped(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of `keys` [n], sorted, and their sums of `counts` [n]: two arrays [distinct] int64."""
    distinct, index = np.unique(keys, return_inverse=True)
    return distinct, _totals(index, counts, len(distinct))
