"""The messages of a `p2p` weight sync, and their order. Pure arithmetic; both ends compute the same result.

All slices that one rank sends to one worker for one layer are packed into as few messages as the size limit allows. The
k-th messages of a layer, over all pairs, form one round. Processes that handle the rounds in order cannot deadlock,
however many rounds are in flight: the process that is furthest behind can always proceed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.models.families.boxes import Box, extent, size
from megagrpo.sync.wire.sync_plan import Transfers, layer_of


@dataclass(frozen=True)
class Slice:
    """The part `box` of `tensor`, flattened, from element `offset` of its message."""

    tensor: str
    box: Box
    offset: int


@dataclass(frozen=True)
class Message:
    """The elements that rank `source` sends to worker `destination` in one round. `tag` is the index of the message
    within the pair."""

    source: int
    destination: int
    tag: int
    slices: tuple[Slice, ...]

    @property
    def elements(self) -> int:
        """Number of elements of all slices."""
        return self.slices[-1].offset + size(self.slices[-1].box)


IN_FLIGHT = 2  # rounds in flight at once, at each end
Round = tuple[int, int]  # (layer, index within the layer)


def rounds(
    transfers: Transfers, limit: int, *, source: int | None = None, destination: int | None = None
) -> dict[Round, list[Message]]:
    """Return round -> messages, in order, of one rank (`source`), of one worker (`destination`), or of all.

    No message has more than `limit` elements: a larger slice is cut.
    """
    chosen = np.ones(len(transfers.source), dtype=bool)
    if source is not None:
        chosen &= transfers.source == source
    if destination is not None:
        chosen &= transfers.destination == destination
    streams: dict[tuple[int, int, int], list[tuple[str, Box]]] = defaultdict(list)  # (source, destination, layer)
    for row in np.flatnonzero(chosen):
        name = transfers.names[transfers.tensor[row]]
        pair = int(transfers.source[row]), int(transfers.destination[row])
        streams[*pair, layer_of(name)] += [
            (name, piece) for piece in pieces(transfers.boxes[transfers.box[row]], limit)
        ]
    by_round: dict[Round, list[Message]] = defaultdict(list)
    tags: dict[tuple[int, int], int] = defaultdict(int)
    for sender, worker, layer in sorted(streams):
        for number, slices in enumerate(_pack(streams[sender, worker, layer], limit)):
            by_round[layer, number].append(Message(sender, worker, tags[sender, worker], slices))
            tags[sender, worker] += 1
    return dict(sorted(by_round.items()))


def pieces(box: Box, limit: int) -> list[Box]:
    """Cut `box` into disjoint boxes of at most `limit` elements, in order, each contiguous within `box`."""
    if size(box) <= limit:
        return [box]
    shape, (lo, hi) = extent(box), box
    dim, inner = next((d, rest) for d, n in enumerate(shape) if n > 1 and (rest := math.prod(shape[d + 1 :])) <= limit)
    step, cuts = limit // inner, []
    for outer in _indices(lo[:dim], hi[:dim]):
        for start in range(lo[dim], hi[dim], step):
            stop = min(start + step, hi[dim])
            cuts.append(((*outer, start, *lo[dim + 1 :]), (*(i + 1 for i in outer), stop, *hi[dim + 1 :])))
    return cuts


def _indices(lo: Sequence[int], hi: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every index tuple in [lo, hi), in order."""
    if not lo:
        yield ()
        return
    for first in range(lo[0], hi[0]):
        for rest in _indices(lo[1:], hi[1:]):
            yield first, *rest


def _pack(stream: Iterable[tuple[str, Box]], limit: int) -> Iterator[tuple[Slice, ...]]:
    """Yield the slices of each message: as many pieces of `stream`, in order, as `limit` elements allow."""
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
