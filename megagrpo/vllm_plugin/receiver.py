"""The worker's end of the p2p transport: receives weights that trainer ranks send directly."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.boxes import Box, brackets, extent, size
from megagrpo.transfer.exchange import Board, Deadline, Exchange, Parcel, Pending, wait
from megagrpo.transfer.manifest import DTYPES, Manifest, SharedBlock, SharedTensor, WeightSyncError, wrong_checksum
from megagrpo.transfer.messages import Message, Round, pieces, rounds
from megagrpo.transfer.plan import layer_of, plan_transfers
from megagrpo.transfer.slices import plan

IN_FLIGHT = 2  # rounds in flight at once
Boxes = Counter[tuple[str, Box]]  # (tensor, box) -> how often the loaders fetch it


class Roster:
    """All tensors of a policy, and the ranks that hold each box of them; it is stored as JSON on the board."""

    def __init__(self, tensors: dict[str, tuple[tuple[int, ...], dict[Box, list[int]]]]):
        self.tensors = tensors

    @property
    def held(self) -> dict[str, dict[Box, list[int]]]:
        """Tensor -> box -> the ranks that hold the box."""
        return {name: boxes for name, (_, boxes) in self.tensors.items()}

    def manifest(self, version: int, dtype: str) -> Manifest:
        """Return the manifest for readers: each block once, however many ranks hold it."""
        tensors = {
            name: SharedTensor(shape, tuple(SharedBlock(ranks[0], "", 0, box, 0) for box, ranks in boxes.items()))
            for name, (shape, boxes) in self.tensors.items()
        }
        return Manifest(version, dtype, tensors)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form that `of_json` reads."""
        return {name: [shape, list(boxes.items())] for name, (shape, boxes) in self.tensors.items()}

    @staticmethod
    def of_json(data: dict[str, Any]) -> Roster:
        """Return the roster from its JSON form."""
        return Roster({name: (tuple(shape), {box_of_json(box): ranks for box, ranks in boxes}) for name, (shape, boxes) in data.items()})


def box_of_json(data: Any) -> Box:
    """Return the box from its JSON form."""
    lo, hi = data
    return tuple(lo), tuple(hi)


def wanted_by(boxes_of: list[dict[str, list[Box]]], names: Any) -> dict[str, dict[Box, list[int]]]:
    """Return tensor -> box -> the workers that want the box, with tensors in the order of `names`. `boxes_of` holds the boxes of each
    worker."""
    wanted: dict[str, dict[Box, list[int]]] = {}
    for name in names:
        for worker, boxes in enumerate(boxes_of):
            for box in boxes.get(name, ()):
                wanted.setdefault(name, {}).setdefault(box, []).append(worker)
    return wanted


def boxes_of_json(data: dict[str, list[Any]]) -> dict[str, list[Box]]:
    """Return the boxes that a worker wants, from its note on the board: tensor -> boxes."""
    return {name: [box_of_json(box) for box in boxes] for name, boxes in data.items()}


class Receiver:
    """The state that a worker keeps between updates: its connection to the board, the group, and the boxes that its loaders fetch."""

    def __init__(self, device: torch.device):
        self.device = device
        self.address: tuple[str, int] | None = None
        self.board: Board | None = None
        self.exchange: Exchange | None = None
        self.roster_key = ""
        self.roster: Roster | None = None
        self.boxes: Boxes = Counter()
        self.boxes_key = ""
        self.planned: tuple[Any, dict[Round, list[Message]]] | None = None
        self.received: Received | None = None

    def join(self, info: dict[str, Any], version: int, deadline: Deadline) -> Manifest:
        """Connect to the board and return the manifest of the trainer's weights.

        Raises WeightSyncError when the board cannot be reached, or when the weights and this worker are on different kinds of device.
        """
        if info["device"] != self.device.type:
            raise WeightSyncError(
                f"the trainer's weights are on {info['device']} and this worker is on {self.device.type}; p2p requires the same device type"
            )
        address = info["host"], info["port"], info["secret"]
        if self.board is None or address != self.address or not self.board.answers():
            self.close()
            self.board, self.address, self.roster_key = Board(info["host"], info["port"], deadline, info["secret"]), address, ""
        if info["roster"] != self.roster_key:
            self.roster = Roster.of_json(self.board.take(info["roster"], "the trainer's roster", deadline))
            self.roster_key, self.boxes, self.boxes_key = info["roster"], Counter(), ""
        return self.roster.manifest(version, info["dtype"])

    def connect(self, info: dict[str, Any], worker: int, find_boxes: Callable[[], Boxes], deadline: Deadline) -> Received:
        """Agree with all ranks and workers on the plan and the group, and start to receive. `find_boxes` is called when the loaders'
        boxes are not known yet."""
        update, number = info["update"], info["first_worker"] + worker
        if not self.boxes_key:
            self.boxes = find_boxes()
            by_name: dict[str, list[Box]] = {}
            for name, box in sorted(self.boxes):
                by_name.setdefault(name, []).append(box)
            self.boxes_key = f"boxes-{digest(by_name)}"
            self.board.put(self.boxes_key, by_name)
        group = self.exchange.name if self.exchange else ""
        self.board.put(f"{update}/worker{number}", {"boxes": self.boxes_key, "group": group})
        members = self.board.take(f"{update}/members", "the other workers and the trainer's decision", deadline, stop=f"{update}/stop")
        limit = info["limit"]
        key = self.roster_key, members["boxes"], limit, number
        if self.planned is None or self.planned[0] != key:
            notes = {note: boxes_of_json(self.board.take(note, "another worker's boxes", deadline)) for note in set(members["boxes"])}
            transfers = plan_transfers(self.roster.held, wanted_by([notes[note] for note in members["boxes"]], self.roster.tensors))
            self.planned = key, rounds(transfers, limit, destination=number)
        if group != members["group"]:
            self.close_group()
            size = info["ranks"] + len(members["boxes"])
            self.exchange = Exchange(self.board, members["group"], info["ranks"] + number, size, self.device, deadline)
        self.received = Received(self.roster, DTYPES[info["dtype"]], limit, self.exchange, self.planned[1], self.boxes, deadline)
        return self.received

    def report(self, info: dict[str, Any], worker: int, told: dict[str, Any]) -> None:
        """Leave this worker's report on the board. Does nothing when the board is gone, because then no process reads it."""
        try:
            self.board.put(f"{info['update']}/report{info['first_worker'] + worker}", told)
        except (WeightSyncError, AttributeError):
            pass

    def close_group(self) -> None:
        """Leave the group; ranks that send to this worker get an error."""
        if self.received is not None:
            self.received.release()
            self.received = None
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    def close(self) -> None:
        """Leave the group and the board."""
        self.close_group()
        self.board = None


class Received:
    """Blocks whose parts arrive in messages with checksums, a few rounds ahead of the loaders. Each part is dropped after its last copy."""

    def __init__(
        self,
        roster: Roster,
        dtype: torch.dtype,
        limit: int,
        exchange: Exchange,
        planned: dict[Round, list[Message]],
        boxes: Boxes,
        deadline: Deadline,
    ):
        self.blocks = {name: tuple(boxes) for name, boxes in roster.held.items()}
        self.dtype, self.limit, self.exchange, self.deadline = dtype, limit, exchange, deadline
        self.to_come = deque(planned.items())
        self.under_way: deque[tuple[Round, list[Message], list[Tensor], list[Pending]]] = deque()
        self.here: dict[tuple[str, Box], Tensor] = {}
        self.sums: dict[tuple[str, Box], tuple[int, int]] = {}  # (tensor, part) -> sending rank, and its checksum
        self.left: Counter[tuple[str, Box]] = Counter()  # (tensor, part) -> number of remaining copies
        for (name, box), times in boxes.items():
            for _, part in self.parts(name, box):
                self.left[name, part] += times
        self.bytes = 0
        self._post()

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Return the parts that make up `box`: (index of the block, part). Raises LookupError for a part that no rank holds."""
        return parts_of(box, self.blocks[name], self.limit)

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return the elements of a part, in its shape and the engine's dtype, after it has arrived.

        Raises WeightSyncError when the sender is gone or late, or when the loaders request a part they did not announce.
        """
        while (name, part) not in self.here and self.under_way and self.under_way[0][0][0] <= layer_of(name):
            self._take_round()
        if (name, part) not in self.here:
            raise WeightSyncError(f"the loader of {name} requests {part}, which it did not announce")
        self.left[name, part] -= 1
        return self.here[name, part] if self.left[name, part] > 0 else self.here.pop((name, part))

    def check(self, name: str, index: int, part: Box, total: int) -> None:
        """Raises WeightSyncError, naming rank and tensor, when `total` differs from the checksum that the rank sent."""
        rank, written = self.sums[name, part]
        if total != written:
            raise WeightSyncError(wrong_checksum(rank, name, part, total, written))

    def proof(self, reads: dict[tuple[str, int, Box], int]) -> dict[str, Any]:
        """Return the sum of the checksums of each layer, which the trainer compares between workers that want the same slices.

        Every part was already checked against the sender's checksum. Raises WeightSyncError when a part arrived and was not read.
        """
        if unread := self.sums.keys() - {(name, part) for name, _, part in reads}:
            name, part = min(unread)
            raise WeightSyncError(f"{name}{brackets(part)} arrived from rank {self.sums[name, part][0]} and was not read")
        layers: Counter[int] = Counter()
        for (name, _, _), total in reads.items():
            layers[layer_of(name)] += total
        return {"layers": {layer: total % 2**64 for layer, total in layers.items()}}

    def drain(self) -> None:
        """Receive all rounds that are still to come."""
        while self.under_way:
            self._take_round()

    def release(self) -> None:
        """Drop everything that has arrived or is in flight."""
        for held in (self.to_come, self.under_way, self.here, self.sums):
            held.clear()

    def _post(self) -> None:
        """Start to receive the next rounds, up to IN_FLIGHT."""
        while self.to_come and len(self.under_way) < IN_FLIGHT:
            number, messages = self.to_come.popleft()
            buffers = [empty_parcel(message, self.dtype, self.exchange.device) for message in messages]
            parcels = [
                Parcel(buffer, message.source, message.tag, f"receiving {contents(message)} from trainer rank {message.source}")
                for buffer, message in zip(buffers, messages, strict=True)
            ]
            self.under_way.append((number, messages, buffers, self.exchange.receive(parcels)))

    def _take_round(self) -> None:
        _, messages, buffers, pending = self.under_way.popleft()
        wait(pending, self.deadline)
        for message, buffer in zip(messages, buffers, strict=True):
            elements, sums = opened(buffer, message, self.dtype)
            self.bytes += elements.nbytes
            for item, total in zip(message.slices, sums.tolist(), strict=True):
                self.here[item.tensor, item.box] = elements[item.offset : item.offset + size(item.box)].view(extent(item.box))
                self.sums[item.tensor, item.box] = message.source, total % 2**64
        self._post()


def empty_parcel(message: Message, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a buffer for the elements of a message and one 64-bit checksum per slice, [bytes] uint8."""
    return torch.empty(_size_of_elements(message, dtype) + 8 * len(message.slices), dtype=torch.uint8, device=device)


def opened(parcel: Tensor, message: Message, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two views of `parcel` [bytes] uint8: the message's elements [elements] of `dtype`, and the checksums [slices] int64."""
    count = _size_of_elements(message, dtype)
    return parcel[:count].view(dtype)[: message.elements], parcel[count:].view(torch.int64)


def _size_of_elements(message: Message, dtype: torch.dtype) -> int:
    """Bytes of the elements, rounded up to whole words of 8 bytes."""
    return -(-message.elements * dtype.itemsize // 8) * 8


def parts_of(box: Box, blocks: tuple[Box, ...], limit: int) -> list[tuple[int, Box]]:
    """Return the parts of blocks that make up `box`, each at most `limit` elements, cut as in `megagrpo.transfer.messages.rounds`."""
    return [(index, piece) for index, part in plan(box, blocks) for piece in pieces(part, limit)]


def contents(message: Message) -> str:
    """Return a description of a message's slices for errors."""
    layer, names = layer_of(message.slices[0].tensor), list(dict.fromkeys(item.tensor for item in message.slices))
    return f"{layer_text(layer)} ({names[0]}" + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")


def layer_text(layer: int) -> str:
    """Return a description of an index from `layer_of` for errors."""
    return f"layer {layer}" if layer >= 0 else "tensors outside of layers"


def digest(data: Any) -> str:
    """Return a short hash of the JSON form of `data`."""
    return hashlib.blake2b(json.dumps(data).encode(), digest_size=12).hexdigest()
