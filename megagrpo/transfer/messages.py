"""In which messages and in which order the slices of a sync travel. Pure arithmetic; both ends compute the same.

Everything that one rank sends to one worker of one layer is packed into as few messages as a bound on their size allows. The k-th messages
of a layer, of all pairs, are one round. Whoever works off the rounds in order, any number of them at once, never waits in a circle: the
one furthest behind can always go on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.families.boxes import Box, extent, size
from megagrpo.transfer.plan import Transfers, layer_of


@dataclass(frozen=True)
class Slice:
    """The part `box` of `tensor`, flat, from element `offset` of its message on."""

    tensor: str
    box: Box
    offset: int


@dataclass(frozen=True)
class Message:
    """What rank `source` sends to worker `destination` in one round. `tag` counts the messages of the pair."""

    source: int
    destination: int
    tag: int
    slices: tuple[Slice, ...]

    @property
    def elements(self) -> int:
        """Elements of all slices."""
        return self.slices[-1].offset + size(self.slices[-1].box)


Round = tuple[int, int]  # (layer, number within it)


def rounds(transfers: Transfers, limit: int, *, source: int | None = None, destination: int | None = None) -> dict[Round, list[Message]]:
    """The messages of one rank, of one worker, or of all, by round and in order. No message has more than `limit` elements: slices that
    do are cut."""
    chosen = np.ones(len(transfers.source), dtype=bool)
    if source is not None:
        chosen &= transfers.source == source
    if destination is not None:
        chosen &= transfers.destination == destination
    streams: dict[tuple[int, int, int], list[tuple[str, Box]]] = defaultdict(list)  # (source, destination, layer)
    for row in np.flatnonzero(chosen):
        name = transfers.names[transfers.tensor[row]]
        pair = int(transfers.source[row]), int(transfers.destination[row])
        streams[*pair, layer_of(name)] += [(name, piece) for piece in pieces(transfers.boxes[transfers.box[row]], limit)]
    found: dict[Round, list[Message]] = defaultdict(list)
    tags: dict[tuple[int, int], int] = defaultdict(int)
    for sender, worker, layer in sorted(streams):
        for number, slices in enumerate(_pack(streams[sender, worker, layer], limit)):
            found[layer, number].append(Message(sender, worker, tags[sender, worker], slices))
            tags[sender, worker] += 1
    return dict(sorted(found.items()))


def pieces(box: Box, limit: int) -> list[Box]:
    """`box` in disjoint boxes of at most `limit` elements, in order, each contiguous in it."""
    if size(box) <= limit:
        return [box]
    shape, (lo, hi) = extent(box), box
    dim, inner = next((d, rest) for d, n in enumerate(shape) if n > 1 and (rest := math.prod(shape[d + 1 :])) <= limit)
    step, cuts = limit // inner, []
    for outer in _places(lo[:dim], hi[:dim]):
        for start in range(lo[dim], hi[dim], step):
            stop = min(start + step, hi[dim])
            cuts.append(((*outer, start, *lo[dim + 1 :]), (*(i + 1 for i in outer), stop, *hi[dim + 1 :])))
    return cuts


def _places(lo: Sequence[int], hi: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not lo:
        yield ()
        return
    for first in range(lo[0], hi[0]):
        for rest in _places(lo[1:], hi[1:]):
            yield first, *rest


def _pack(stream: Iterable[tuple[str, Box]], limit: int) -> Iterator[tuple[Slice, ...]]:
    packed: list[Slice] = []
    filled = 0
    for name, box in stream:
        if packed and filled + size(box) > limit:
            yield tuple(packed)
            packed, filled = [], 0
        packed.append(Slice(name, box, filled))
        filled += size(box)
    if packed:
        yield tuple(packed)
