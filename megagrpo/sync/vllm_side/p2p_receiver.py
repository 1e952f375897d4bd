"""The worker's end of the p2p transport: receives weights that trainer ranks send directly.

An update has four steps: join the trainer's store, agree with all ranks and workers, plan the messages, and receive
them. Rounds of messages (`wire/messages.py`) are received in the order of the plan, a few ahead of the loaders. In a
chain of servers (`trainer_side/send_plan.py`) a worker passes each round on as soon as it has arrived.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.families.shared.boxes import Box, brackets, extent, size
from megagrpo.platform.rendezvous.store_exchange import Deadline, Exchange, PeerBuffer, Pending, Store, wait
from megagrpo.sync.vllm_side.receiver import BlockSource, BoxCounts, Receiver, Worker
from megagrpo.sync.wire.messages import (
    IN_FLIGHT,
    Message,
    Round,
    describe,
    empty_message,
    message_views,
    pieces,
    rounds,
)
from megagrpo.sync.wire.rank_boxes import RankBoxes, by_tensor
from megagrpo.sync.wire.store_messages import Decision, DirectRequest, PlanPart, content_key, part_key
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.box_slices import cover
from megagrpo.weights.slices.sync_plan import layer_of
from megagrpo.weights.slices.tensor_index import ENGINE_DTYPES, TensorIndex, wrong_checksum


class P2pReceiver(Receiver):
    """A worker's part in updates. Its connection to the store, group, boxes of loaders and plan are reused."""

    def __init__(self, worker: Worker):
        super().__init__(worker)
        self.address: tuple[str, int, str] | None = None  # host, port and secret of `store`
        self.store: Store | None = None
        self.exchange: Exchange | None = None
        self.rank_boxes: RankBoxes | None = None
        self.packed_boxes = ""  # the text that `rank_boxes` was read from
        self.boxes: BoxCounts = Counter()
        self.boxes_key = ""  # "" while the boxes are unknown
        self.plan: ReceivePlan | None = None
        self.received: ReceivedBlocks | None = None
        self.request: DirectRequest | None = None  # of the current update

    def open(self, request: dict[str, Any], version: int) -> ReceivedBlocks:
        """Take part in the update of `DirectUpdate.request` and return its source of values. Raises WeightSyncError."""
        self.request = asked = DirectRequest(**request)
        number, deadline = asked.first_worker + self.worker.index, Deadline(asked.seconds)
        store, rank_boxes = self._join(asked, deadline)
        index = rank_boxes.index(version, asked.dtype)
        decision = self._agree(store, asked, index, deadline)
        if self.plan is None or self.plan.number != decision.plan:
            self.plan = self._plan(store, rank_boxes, decision.plan, deadline)
        if self.exchange is None or self.exchange.name != decision.group:
            self.abort()
            world_size = asked.ranks + decision.workers
            rank, device = asked.ranks + number, self.worker.device
            self.exchange = Exchange(store, decision.group, rank, world_size, device, deadline)
        self.received = ReceivedBlocks(index, self.plan, self.exchange, deadline)
        return self.received

    def _join(self, request: DirectRequest, deadline: Deadline) -> tuple[Store, RankBoxes]:
        """Step 1: connect to the trainer's store, and return it and the boxes of its ranks.

        Reconnects when it is another store, or no longer responds. Raises WeightSyncError when the store cannot be
        reached, or when the weights and this worker are on different kinds of device.
        """
        if request.device != self.worker.device.type:
            raise WeightSyncError(
                f"the trainer's weights are on {request.device} and this worker is on {self.worker.device.type}; p2p "
                "requires the same device type"
            )
        address = request.host, request.port, request.secret
        if self.store is None or address != self.address or not self.store.answers():
            self.close()
            self.store = Store(request.host, request.port, deadline, request.secret)
            self.address, self.boxes_key, self.plan = address, "", None
        if self.rank_boxes is None or request.rank_boxes != self.packed_boxes:
            self.rank_boxes, self.packed_boxes = RankBoxes.unpacked(request.rank_boxes), request.rank_boxes
            self.boxes_key, self.plan = "", None
        return self.store, self.rank_boxes

    def _agree(self, store: Store, request: DirectRequest, index: TensorIndex, deadline: Deadline) -> Decision:
        """Step 2: store this worker's boxes (from a dry run) and group. Returns rank 0's decision about all workers."""
        if not self.boxes_key:
            self.boxes = self.worker.dry_run(index)
            boxes = by_tensor(self.boxes)
            self.boxes_key = content_key("boxes", boxes)
            if not store.has(self.boxes_key):
                store.put(self.boxes_key, boxes)
        group = self.exchange.name if self.exchange is not None else ""
        number, what = request.first_worker + self.worker.index, "the other workers and the trainer's decision"
        store.put(request.keys.worker(number), {"boxes": self.boxes_key, "group": group})
        decision = Decision(**store.take(request.keys.decision, what, deadline))
        if decision.stop:
            raise WeightSyncError(f"waiting for {what}: {decision.stop}")
        return decision

    def _plan(self, store: Store, rank_boxes: RankBoxes, number: int, deadline: Deadline) -> ReceivePlan:
        """Step 3: find the messages of this worker in plan `number`, from its own boxes and its part of the plan."""
        assert self.request is not None, "an update is open"
        asked = self.request
        worker = asked.first_worker + self.worker.index
        part = PlanPart(**store.take(part_key(number, worker), "the plan", deadline))
        choices = np.array([(part.head, *choice) for choice in part.choices], dtype=np.int64).reshape(-1, 4)
        transfers = rank_boxes.transfers_to({part.head: by_tensor(self.boxes)}, rank_boxes.sources(choices))
        blocks = {name: tuple(boxes) for name, boxes in rank_boxes.holders.items()}
        return ReceivePlan(
            number,
            rounds(transfers, asked.limit, destination=part.head),
            blocks,
            copies_of_parts(self.boxes, blocks, asked.limit),
            asked.limit,
            *((asked.ranks + peer[0], peer[1]) if peer is not None else None for peer in (part.feeder, part.next)),
        )

    def report(self, report: dict[str, Any]) -> None:
        """Leave this worker's report in the store. Does nothing when the store is gone: then no process reads it."""
        if self.store is not None and self.request is not None:
            with contextlib.suppress(WeightSyncError):
                self.store.put(self.request.keys.report(self.request.first_worker + self.worker.index), report)

    def abort(self) -> None:
        """Leave the group; ranks that send to this worker get an error."""
        if self.received is not None:
            self.received.release()
            self.received = None
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    def close(self) -> None:
        """Leave the group and the store."""
        self.abort()
        self.store = None


@dataclass(frozen=True)
class ReceivePlan:
    """Everything that one worker receives in an update, in order, and how often its loaders copy each part.

    A part is a piece of a block with at most `limit` elements; a message carries whole parts.
    """

    number: int
    rounds: Mapping[Round, list[Message]]  # in order
    blocks: Mapping[str, tuple[Box, ...]]  # tensor -> blocks of the trainer's ranks
    copies: Mapping[tuple[str, Box], int]  # (tensor, part) -> number of copies
    limit: int
    # index in the process group, and name: the worker that passes all messages on to this one, and the next one
    feeder: tuple[int, str] | None = None
    next: tuple[int, str] | None = None


@dataclass(frozen=True)
class _RoundInFlight:
    """One round that this worker receives: its messages, a buffer for each of them, and the pending receives."""

    layer: int
    messages: list[Message]
    buffers: list[PeerBuffer]
    pending: list[Pending]


class ReceivedBlocks(BlockSource):
    """The blocks of a `p2p` update. Construction starts to receive the first rounds.

    A part stays in memory until its last copy. Loaders that read layers out of order cost memory for the parts between.
    """

    def __init__(self, index: TensorIndex, plan: ReceivePlan, exchange: Exchange, deadline: Deadline):
        super().__init__(index)
        self.plan, self.exchange, self.dtype, self.deadline = plan, exchange, ENGINE_DTYPES[index.dtype], deadline
        self.to_come = deque(plan.rounds.items())
        self.in_flight: deque[_RoundInFlight] = deque()
        self.arrived: dict[tuple[str, Box], Tensor] = {}  # (tensor, part) -> its elements
        self._sums: dict[tuple[str, Box], tuple[int, int]] = {}  # (tensor, part) -> sending rank, and its checksum
        # messages whose checksums [slices] int64 are not in `_sums` yet
        self._arrived_sums: list[tuple[Message, Tensor]] = []
        self.copies_left = Counter(plan.copies)
        self.posted = self.relayed = self.relayed_bytes = 0  # messages received or expected, and messages passed on
        self.relaying: deque[tuple[list[Pending], list[PeerBuffer]]] = deque()
        self._post()

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Return the parts that make up `box`, each at most a message: (index of the block, part)."""
        return parts_of(box, self.plan.blocks[name], self.plan.limit)

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return the elements of a part, in its shape and the engine's dtype, after it has arrived.

        Raises WeightSyncError when the sender is gone or late, or when the loaders request an unannounced part.
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
        """Return the sum of each layer's checksums. The trainer compares it between workers that want the same slices.

        Every part already matched the sender's checksum. Raises WeightSyncError when a part arrived and was not read.
        """
        if unread := self.sums().keys() - {(name, part) for name, _, part in reads}:
            name, part = min(unread)
            raise WeightSyncError(
                f"{name}{brackets(part)} arrived from rank {self._sums[name, part][0]} and was not read"
            )
        layers: Counter[int] = Counter()
        for (name, _, _), total in reads.items():
            layers[layer_of(name)] += total
        sums = {layer: total % 2**64 for layer, total in layers.items()}
        return {"layers": sums, "relayed": self.relayed_bytes}

    def drain(self) -> None:
        """Receive all rounds that are still to come, and wait until everything is passed on."""
        while self.in_flight:
            self._take_round()
        while self.relaying:
            wait(self.relaying.popleft()[0], self.deadline)

    def release(self) -> None:
        """Drop everything that has arrived or is in flight."""
        sent = (pending for of_round, _ in self.relaying for pending in of_round)
        self.exchange.cancel(itertools.chain(sent, *(of_round.pending for of_round in self.in_flight)))
        self.to_come.clear()
        self.in_flight.clear()
        self.relaying.clear()
        self.arrived.clear()
        self._sums.clear()
        self._arrived_sums.clear()

    def _post(self) -> None:
        """Start to receive the next rounds, up to IN_FLIGHT."""
        while self.to_come and len(self.in_flight) < IN_FLIGHT:
            (layer, _), messages = self.to_come.popleft()
            buffers = [self._buffer_for(message) for message in messages]
            self.in_flight.append(_RoundInFlight(layer, messages, buffers, self.exchange.receive(buffers)))

    def _buffer_for(self, message: Message) -> PeerBuffer:
        """Return an empty buffer for a message, which comes from its rank or from this worker's feeder."""
        buffer, peer, tag = empty_message(message, self.dtype, self.exchange.device), message.source, message.tag
        what = f"receiving {describe(message)} from trainer rank {message.source}"
        if self.plan.feeder is not None:
            (peer, name), tag = self.plan.feeder, self.posted
            what += f", passed on by {name}"
        self.posted += 1
        return PeerBuffer(buffer, peer, tag, what)

    def _pass_on(self, arrived: _RoundInFlight) -> None:
        """Start to send a round to the next worker of the chain, if any, with IN_FLIGHT rounds on the way at most."""
        if self.plan.next is None:
            return
        peer, name = self.plan.next
        if len(self.relaying) == IN_FLIGHT:
            wait(self.relaying.popleft()[0], self.deadline)
        buffers = []
        for message, buffer in zip(arrived.messages, arrived.buffers, strict=True):
            what = f"passing {describe(message)} on to {name}"
            buffers.append(PeerBuffer(buffer.values, peer, self.relayed, what))
            self.relayed += 1
            self.relayed_bytes += message.elements * self.dtype.itemsize
        self.relaying.append((self.exchange.send(buffers), buffers))

    def _take_round(self) -> None:
        """Wait for the oldest round in flight, pass it on, unpack its parts, and post the next round."""
        oldest = self.in_flight.popleft()
        wait(oldest.pending, self.deadline)
        self._pass_on(oldest)
        for message, buffer in zip(oldest.messages, oldest.buffers, strict=True):
            elements, sums = message_views(buffer.values, message, self.dtype)
            self.bytes += elements.nbytes
            for item in message.slices:
                self.arrived[item.tensor, item.box] = elements[item.offset : item.offset + size(item.box)].view(
                    extent(item.box)
                )
            self._arrived_sums.append((message, sums.clone()))  # a view would keep the whole message
        self._post()

    def sums(self) -> dict[tuple[str, Box], tuple[int, int]]:
        """(tensor, part) -> sending rank and checksum of all arrived parts. One transfer serves all new messages."""
        if self._arrived_sums:
            totals = iter(torch.cat([sums for _, sums in self._arrived_sums]).tolist())
            for message, _ in self._arrived_sums:
                self._sums |= {
                    (item.tensor, item.box): (message.source, next(totals) % 2**64) for item in message.slices
                }
            self._arrived_sums = []
        return self._sums


def copies_of_parts(boxes: BoxCounts, blocks: Mapping[str, tuple[Box, ...]], limit: int) -> Counter[tuple[str, Box]]:
    """Return how often loaders that fetch `boxes` copy each part. Raises LookupError for a box that no rank holds."""
    copies: Counter[tuple[str, Box]] = Counter()
    for (name, box), times in boxes.items():
        for _, part in parts_of(box, blocks[name], limit):
            copies[name, part] += times
    return copies


def parts_of(box: Box, blocks: tuple[Box, ...], limit: int) -> list[tuple[int, Box]]:
    """Return the parts of blocks that make up `box`, each at most `limit` elements, cut as in
    `megagrpo.sync.wire.messages.rounds`."""
    return [(index, piece) for index, part in cover(box, blocks) for piece in pieces(part, limit)]
