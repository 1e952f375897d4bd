"""The plan of a whole weight sync as data: which rank sends which slice of which tensor to which worker. No tensors, no communication.

Both sides speak of boxes of Hugging Face tensors: a trainer's rank holds some (its blocks), an engine's worker wants some (what its
loaders copy). The plan gives every worker each element that it wants exactly once, from a rank that holds it, and depends on nothing but
its arguments, so every rank can compute it for itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megagrpo.families.boxes import Box, size
from megagrpo.transfer.slices import plan

Roster = Mapping[str, Mapping[Box, Sequence[int]]]  # tensor -> box -> the ranks that hold it, or the workers that want it
SMALL = 2**19  # elements; a message of fewer takes longer to start than to send, so it had better join one that goes anyway


@dataclass(frozen=True)
class Transfers:
    """One row for each slice that is sent: `boxes[box]` of `names[tensor]`, from rank `source` to worker `destination`.

    A message holds what a source sends to a destination of one layer, the tensors outside of all layers being one more.
    """

    names: tuple[str, ...]
    boxes: tuple[Box, ...]
    tensor: np.ndarray  # [n] int64, as the others
    box: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    elements: np.ndarray

    @property
    def total(self) -> int:
        """Elements sent."""
        return int(self.elements.sum())

    def sent(self, num_sources: int) -> np.ndarray:
        """Elements that each source sends, [num_sources]."""
        return _totals(self.source, self.elements, num_sources)

    def received(self, num_destinations: int) -> np.ndarray:
        """Elements that each destination gets, [num_destinations]."""
        return _totals(self.destination, self.elements, num_destinations)

    def links(self) -> dict[tuple[int, int], int]:
        """(source, destination) -> elements, of the pairs that exchange any."""
        sources, destinations, elements = self.messages
        pairs, totals = _grouped(sources << 32 | destinations, elements)
        return {(int(pair >> 32), int(pair & 0xFFFFFFFF)): int(n) for pair, n in zip(pairs, totals, strict=True)}

    @cached_property
    def messages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, destination, elements) of each message."""
        layers = np.array([layer_of(name) + 1 for name in self.names], dtype=np.int64)
        keys, totals = _grouped(self.source << 40 | self.destination << 20 | layers[self.tensor], self.elements)
        return keys >> 40, keys >> 20 & 0xFFFFF, totals


def plan_transfers(held: Roster, wanted: Roster) -> Transfers:
    """Who sends what to whom, of every tensor in `wanted`.

    Where several ranks hold a slice, each message goes to the one that sends least so far, the largest first and those without a choice
    before all others; small ones join a message that goes anyway. LookupError, with tensor and box, when nobody holds what is wanted.
    """
    pieces = _pieces(held, wanted)
    chosen = _choose(pieces, [layer_of(name) for name in wanted])
    boxes: dict[Box, int] = {}
    rows = ((t, boxes.setdefault(part, len(boxes)), n, len(to), by[0] if len(by) == 1 else -1) for t, part, n, by, to in pieces)
    table = np.fromiter((value for row in rows for value in row), dtype=np.int64).reshape(-1, 5)
    tensor, box, elements, source = (np.repeat(table[:, column], table[:, 3]) for column in (0, 1, 2, 4))
    source[source < 0] = chosen
    destination = np.fromiter((worker for *_, to in pieces for worker in to), dtype=np.int64, count=len(source))
    return Transfers(tuple(wanted), tuple(boxes), tensor, box, source, destination, elements)


def layer_of(name: str) -> int:
    """The number of the decoder layer that a tensor belongs to; -1 outside of all layers."""
    return next((int(word) for word in name.split(".") if word.isdigit()), -1)


Piece = tuple[int, Box, int, tuple[int, ...], tuple[int, ...]]  # tensor, part of it, its elements, who holds it, who wants it


def _pieces(held: Roster, wanted: Roster) -> list[Piece]:
    """Every wanted box cut along the blocks that hold it. Tensors of one shape in one layout are cut alike, so the cuts are kept."""
    cuts: dict[tuple[Box, tuple[Box, ...]], list[tuple[int, Box, int]]] = {}
    pieces: list[Piece] = []
    for number, (name, wants) in enumerate(wanted.items()):
        holders = held.get(name, {})
        blocks, ranks = tuple(holders), [tuple(group) for group in holders.values()]
        for box, workers in wants.items():
            if (box, blocks) not in cuts:
                try:
                    parts = plan(box, blocks)
                except LookupError as error:
                    raise LookupError(f"{name}: {error}") from None
                cuts[box, blocks] = [(index, part, size(part)) for index, part in parts]
            pieces += [(number, part, count, ranks[index], tuple(workers)) for index, part, count in cuts[box, blocks]]
    return pieces


def _choose(pieces: list[Piece], layers: Sequence[int]) -> list[int]:
    """Of the pieces that several ranks hold, one after the other, the rank that sends it to each of its workers."""
    load: Counter[int] = Counter()
    sending: dict[tuple[int, tuple[int, ...]], set[int]] = defaultdict(set)  # (layer, workers) -> who sends them a message
    groups: Counter[tuple[tuple[int, ...], int, int]] = Counter()  # (who could send, worker, layer) -> elements
    for tensor, _, count, ranks, workers in pieces:
        if len(ranks) == 1:
            load[ranks[0]] += count * len(workers)
            sending[layers[tensor], workers].add(ranks[0])
        else:
            for worker in workers:
                groups[ranks, worker, layers[tensor]] += count
    together: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # worker -> the workers that it gets something together with
    for workers in {workers for _, workers in sending}:
        for worker in workers:
            together[worker].append(workers)
    chosen = {}
    for group, count in sorted(groups.items(), key=lambda item: (len(item[0][0]), -item[1])):  # stable: ties stay in order
        ranks, worker, layer = group
        able = []
        if count <= SMALL:
            there = sending[layer, (worker,)].union(*(sending.get((layer, workers), ()) for workers in together[worker]))
            able = [rank for rank in ranks if rank in there]
        chosen[group] = min(able or ranks, key=lambda rank: (load[rank], rank))
        load[chosen[group]] += count
        sending[layer, (worker,)].add(chosen[group])
    return [chosen[ranks, worker, layers[tensor]] for tensor, _, _, ranks, workers in pieces if len(ranks) > 1 for worker in workers]


def _totals(index: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, index, counts)
    return totals


def _grouped(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys, sorted, and the sum of the counts of each."""
    distinct, place = np.unique(keys, return_inverse=True)
    return distinct, _totals(place, counts, len(distinct))
