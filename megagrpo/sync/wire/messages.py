"""The messages of a `p2p` weight sync, their order and their bytes. Both ends compute the same result.

All slices that one rank sends to one worker for one layer are packed into as few messages as the size limit allows. The
k-th messages of a layer, over all pairs, form one round. Processes that handle the rounds in order cannot deadlock,
however many rounds are in flight: the process that is furthest behind can always proceed.

On the way a message is its elements, padded to whole words of 8 bytes, and then a 64-bit checksum of each slice.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megagrpo.families.shared.boxes import Box, extent, size
from megagrpo.weights.slices.sync_plan import Transfers, layer_of


@dataclass(frozen=True)
class Slice:
    """The part `box` of `tensor`, flattened, from element `offset` of its message."""

    tensor: str
    box: Box
    offset: int


@dataclass(frozen=True)
class Message:
    """The elements that rank `source` sends to worker `destination` in a round. `tag` is their index in the pair."""

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
    for outer in itertools.product(*map(range, lo[:dim], hi[:dim])):
        for start in range(lo[dim], hi[dim], step):
            stop = min(start + step, hi[dim])
            cuts.append(((*outer, start, *lo[dim + 1 :]), (*(i + 1 for i in outer), stop, *hi[dim + 1 :])))
    return cuts


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


def empty_message(message: Message, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a buffer for all bytes of a message with elements of `dtype`, [bytes] uint8 on `device`."""
    return torch.empty(_size_of_elements(message, dtype) + 8 * len(message.slices), dtype=torch.uint8, device=device)


def message_views(buffer: Tensor, message: Message, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two views of `buffer` [bytes] uint8: elements [elements] of `dtype`, and checksums [slices] int64."""
    count = _size_of_elements(message, dtype)
    return buffer[:count].view(dtype)[: message.elements], buffer[count:].view(torch.int64)


def describe(message: Message) -> str:
    """Return the layer and the tensors of a message, as text for errors."""
    layer, names = layer_of(message.slices[0].tensor), list(dict.fromkeys(item.tensor for item in message.slices))
    return f"{layer_text(layer)} ({names[0]}" + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")


def layer_text(layer: int) -> str:
    """Return an index from `layer_of` as text for errors."""
    return f"layer {layer}" if layer >= 0 else "tensors outside of layers"


def _size_of_elements(message: Message, dtype: torch.dtype) -> int:
    """Return the bytes of the elements, rounded up to whole words of 8 bytes."""
    return -(-message.elements * dtype.itemsize // 8) * 8
