"""Blocks that arrive in messages of the trainer's ranks. Rounds of messages (`transfer.messages`) are received in the
order of the plan, a few ahead of the loaders that read them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagrpo.models.families.boxes import Box, brackets, extent, size
from megagrpo.sync.wire.box_slices import cover
from megagrpo.sync.wire.exchange import Deadline, Exchange, Parcel, Pending, wait
from megagrpo.sync.wire.manifest import WeightSyncError, wrong_checksum
from megagrpo.sync.wire.message_bytes import describe, empty_message, message_views
from megagrpo.sync.wire.messages import IN_FLIGHT, Message, Round, pieces
from megagrpo.sync.wire.sync_plan import layer_of

BoxCounts = Counter[tuple[str, Box]]  # (tensor, box) -> how often the loaders fetch it


@dataclass(frozen=True)
class ReceivePlan:
    """Everything that one worker receives in an update, in order, and how often its loaders copy each part.

    A part is a piece of a block with at most `limit` elements; a message carries whole parts.
    """

    rounds: Mapping[Round, list[Message]]  # in order
    blocks: Mapping[str, tuple[Box, ...]]  # tensor -> blocks of the trainer's ranks
    copies: Mapping[tuple[str, Box], int]  # (tensor, part) -> number of copies
    limit: int

    @staticmethod
    def of(
        rounds: Mapping[Round, list[Message]], blocks: Mapping[str, tuple[Box, ...]], boxes: BoxCounts, limit: int
    ) -> ReceivePlan:
        """Return the plan for loaders that fetch `boxes`. Raises LookupError for a box that no rank holds."""
        copies: Counter[tuple[str, Box]] = Counter()
        for (name, box), times in boxes.items():
            for _, part in parts_of(box, blocks[name], limit):
                copies[name, part] += times
        return ReceivePlan(rounds, blocks, copies, limit)


@dataclass(frozen=True)
class _RoundInFlight:
    """One round that this worker receives: its messages, a buffer [bytes] uint8 for each of them, and the pending
    receives."""

    layer: int
    messages: list[Message]
    buffers: list[Tensor]
    pending: list[Pending]


class ReceivedBlocks:
    """The `BlockSource` of a `p2p` update. Elements are of `dtype`. Construction starts to receive the first rounds.

    A part stays in memory until its last copy. Loaders that do not read the layers in order therefore cost memory for
    all parts in between.
    """

    def __init__(self, plan: ReceivePlan, exchange: Exchange, dtype: torch.dtype, deadline: Deadline):
        self.plan, self.exchange, self.dtype, self.deadline = plan, exchange, dtype, deadline
        self.to_come = deque(plan.rounds.items())
        self.in_flight: deque[_RoundInFlight] = deque()
        self.arrived: dict[tuple[str, Box], Tensor] = {}  # (tensor, part) -> its elements
        self._sums: dict[tuple[str, Box], tuple[int, int]] = {}  # (tensor, part) -> sending rank, and its checksum
        # messages whose checksums [slices] int64 are not in `_sums` yet
        self._arrived_sums: list[tuple[Message, Tensor]] = []
        self.copies_left = Counter(plan.copies)
        self.bytes = 0
        self._post()

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Return the parts that make up `box`: (index of the block, part). Raises LookupError for a part that no rank
        holds."""
        return parts_of(box, self.plan.blocks[name], self.plan.limit)

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return the elements of a part, in its shape and the engine's dtype, after it has arrived.

        Raises WeightSyncError when the sender is gone or late, or when the loaders request a part they did not
        announce.
        """
        # Rounds are in layer order, so a part of this layer cannot arrive in a round of a later layer.
        while (name, part) not in self.arrived and self.in_flight and self.in_flight[0].layer <= layer_of(name):
            self._take_round()
        if (name, part) not in self.arrived:
            raise WeightSyncError(f"the loader of {name} requests {part}, which it did not announce")
        self.copies_left[name, part] -= 1
        return self.arrived[name, part] if self.copies_left[name, part] > 0 else self.arrived.pop((name, part))

    def check(self, name: str, index: int, part: Box, total: int) -> None:
        """Raises WeightSyncError, naming rank and tensor, when `total` differs from the checksum that the rank sent."""
        rank, written = self.sums()[name, part]
        if total != written:
            raise WeightSyncError(wrong_checksum(rank, name, part, total, written))

    def proof(self, reads: Mapping[tuple[str, int, Box], int]) -> dict[str, Any]:
        """Return the sum of the checksums of each layer, which the trainer compares between workers that want the same
        slices.

        Every part was already checked against the sender's checksum. Raises WeightSyncError when a part arrived and was
        not read.
        """
        if unread := self.sums().keys() - {(name, part) for name, _, part in reads}:
            name, part = min(unread)
            raise WeightSyncError(
                f"{name}{brackets(part)} arrived from rank {self._sums[name, part][0]} and was not read"
            )
        layers: Counter[int] = Counter()
        for (name, _, _), total in reads.items():
            layers[layer_of(name)] += total
        return {"layers": {layer: total % 2**64 for layer, total in layers.items()}}

    def drain(self) -> None:
        """Receive all rounds that are still to come."""
        while self.in_flight:
            self._take_round()

    def release(self) -> None:
        """Drop everything that has arrived or is in flight."""
        self.to_come.clear()
        self.in_flight.clear()
        self.arrived.clear()
        self._sums.clear()
        self._arrived_sums.clear()

    def _post(self) -> None:
        """Start to receive the next rounds, up to IN_FLIGHT."""
        while self.to_come and len(self.in_flight) < IN_FLIGHT:
            (layer, _), messages = self.to_come.popleft()
            buffers = [empty_message(message, self.dtype, self.exchange.device) for message in messages]
            parcels = [
                Parcel(
                    buffer,
                    message.source,
                    message.tag,
                    f"receiving {describe(message)} from trainer rank {message.source}",
                )
                for buffer, message in zip(buffers, messages, strict=True)
            ]
            self.in_flight.append(_RoundInFlight(layer, messages, buffers, self.exchange.receive(parcels)))

    def _take_round(self) -> None:
        """Wait for the oldest round in flight, unpack its parts, and post the next round."""
        oldest = self.in_flight.popleft()
        wait(oldest.pending, self.deadline)
        for message, buffer in zip(oldest.messages, oldest.buffers, strict=True):
            elements, sums = message_views(buffer, message, self.dtype)
            self.bytes += elements.nbytes
            for item in message.slices:
                self.arrived[item.tensor, item.box] = elements[item.offset : item.offset + size(item.box)].view(
                    extent(item.box)
                )
            self._arrived_sums.append((message, sums.clone()))  # a view would keep the whole message
        self._post()

    def sums(self) -> dict[tuple[str, Box], tuple[int, int]]:
        """(tensor, part) -> sending rank and checksum of all parts that arrived. One transfer serves all messages since
        the last call."""
        if self._arrived_sums:
            totals = iter(torch.cat([sums for _, sums in self._arrived_sums]).tolist())
            for message, _ in self._arrived_sums:
                self._sums |= {
                    (item.tensor, item.box): (message.source, next(totals) % 2**64) for item in message.slices
                }
            self._arrived_sums = []
        return self._sums


def parts_of(box: Box, blocks: tuple[Box, ...], limit: int) -> list[tuple[int, Box]]:
    """Return the parts of blocks that make up `box`, each at most `limit` elements, cut as in
    `megagrpo.sync.wire.messages.rounds`."""
    return [(index, piece) for index, part in cover(box, blocks) for piece in pieces(part, limit)]
