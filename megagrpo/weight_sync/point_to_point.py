"""The p2p transport: trainer ranks send weights directly to workers, by gloo between CPUs or NCCL between GPUs, across hosts.

Every rank and worker knows which boxes each rank holds and each worker wants, and computes the same plan from this. A rank packs the slices
of one layer for one worker into messages of bounded size, and keeps a few messages in flight. Replicas of a block share the sending. Every
element crosses the wire once per worker that wants it. Plan and process group are reused until a server or worker is replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.engine.protocol import Engine
from megagrpo.families.blocks import Block
from megagrpo.families.boxes import Box, brackets, intersect, missing, size, whole
from megagrpo.transfer.checksums import copy_checked
from megagrpo.transfer.exchange import Board, Deadline, Exchange, Parcel, Pending, let_go, own_address, wait
from megagrpo.transfer.manifest import DTYPES, Manifest, WeightSyncError
from megagrpo.transfer.messages import Message, Round, rounds
from megagrpo.transfer.plan import layer_of, plan_transfers
from megagrpo.vllm_plugin.receiver import IN_FLIGHT, Roster, boxes_of_json, contents, digest, empty_parcel, layer_text, opened, wanted_by
from megagrpo.weight_sync.transport import Given, Ranks
from megagrpo.weight_sync.verification import verify_versions

Found = list[tuple[str, Tensor, Sequence[Block]]]


@dataclass(frozen=True)
class Invitation:
    """The data that every rank needs for an update: address and secret of rank 0's board, the index of the attempt, and the servers."""

    host: str
    port: int
    secret: str = field(repr=False)
    attempt: int
    servers: dict[str, int]  # url -> number of workers


class PointToPoint:
    """The transport for servers with their own GPUs or on other hosts.

    `device` holds this rank's tensors. `seconds` is the limit for a whole sync. `megabytes` is the limit for one message, in MiB.
    """

    def __init__(self, ranks: Ranks, dtype: str, device: torch.device, *, seconds: float = 300.0, megabytes: float = 64.0):
        self.ranks, self.dtype, self.device, self.seconds = ranks, dtype, device, seconds
        self.limit = max(1, int(megabytes * 2**20) // DTYPES[dtype].itemsize)
        self.board: Board | None = None
        self.secret = secrets.token_hex(32)  # only rank 0's secret is used
        self.exchange: Exchange | None = None
        self.roster: Roster | None = None
        self.roster_key = ""
        self.attempts = 0
        self.num_noted = 0  # number of workers with notes of the last attempt
        self.servers: dict[str, int] = {}  # url -> number of workers, of the servers in the current group
        self.planned: tuple[Any, dict[Round, list[Message]], int] | None = None

    def close(self) -> None:
        """Leave the group and the board."""
        self.leave_group()
        self.board = None

    def leave_group(self) -> None:
        """Leave the group; workers that wait for this rank get an error. The next sync forms a new group."""
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    def prepare(self, found: Found, version: int, engine: Engine | None) -> DirectUpdate:
        """Check the weights and agree on the servers that take part. Collective.

        `found` is a list of (parameter name, parameter, its blocks). Raises WeightSyncError on every rank when any rank has a problem.
        """
        problem, invitation = None, None
        try:
            held = _Held(found)
            held.check(self.roster, self.ranks.world_rank)
            if engine is not None:
                invitation = self._invite(engine)
        except Exception as error:
            problem = f"rank {self.ranks.world_rank}: {error}"
        keys = held.keys if self.roster is None and problem is None else None
        told = self.ranks.all_gather_objects((problem, invitation, keys, self.exchange and self.exchange.name))
        if problems := [problem for problem, *_ in told if problem]:
            raise WeightSyncError("; ".join(problems))
        if self.roster is None:
            self._enroll([keys for _, _, keys, _ in told])
        invitation, group = told[0][1], told[0][3] if len({name for *_, name in told}) == 1 else None
        if invitation.servers != self.servers:  # the workers' numbers have changed
            self.leave_group()
            self.servers, group = invitation.servers, None
        return DirectUpdate(self.roster.manifest(version, self.dtype), self, held, invitation, len(told), group, Deadline(self.seconds))

    def all_gather(self, told: Any) -> list[Any]:
        """Gather `told` from every rank, in rank order. No timeout here: each rank's part in an update has its own deadline."""
        return self.ranks.all_gather_objects(told)

    def _invite(self, engine: Engine) -> Invitation:
        """Return the invitation, on rank 0: the address of the board, the attempt, and the servers. Starts the board when it must move or
        is missing."""
        servers = engine.workers()
        host = _meeting_address(servers)
        if self.board is None or self.board.host != host:
            self.leave_group()
            self.board = Board(host, 0, Deadline(self.seconds), self.secret, serve=True)
        self.attempts += 1
        return Invitation(host or _name_of_this_host(), self.board.port, self.secret, self.attempts, servers)

    def _enroll(self, keys: list[list[tuple[str, tuple[int, ...], Box]]]) -> None:
        tensors: dict[str, tuple[tuple[int, ...], dict[Box, list[int]]]] = {}
        for rank, own in enumerate(keys):
            for name, shape, box in own:
                tensors.setdefault(name, (shape, {}))[1].setdefault(box, []).append(rank)
        self.roster = Roster({name: tensors[name] for name in sorted(tensors, key=lambda name: (layer_of(name), name))})
        self.roster_key = f"roster-{digest(self.roster.as_json())}"

    def plan(self, boxes: list[str], deadline: Deadline) -> tuple[dict[Round, list[Message]], int]:
        """Return (this rank's messages by round, the bytes that all workers need from all ranks).

        `boxes` holds, per worker, the key of the note with its boxes.
        """
        if self.planned is None or self.planned[0] != boxes:
            notes = self._notes(boxes, deadline)
            if self.ranks.world_rank == 0:
                self._check_coverage(boxes, notes)
            wanted = wanted_by([notes[key] for key in boxes], self.roster.tensors)
            transfers = plan_transfers(self.roster.held, wanted)
            need = sum(size(box) * len(workers) for wants in wanted.values() for box, workers in wants.items())
            mine = rounds(transfers, self.limit, source=self.ranks.world_rank)
            self.planned = boxes, mine, need * DTYPES[self.dtype].itemsize
        return self.planned[1:]

    def drifted(self, layer: int, one: int, other: int, deadline: Deadline) -> str:
        """Return the error text for workers `one` and `other` that want the same slices of a layer and received different values.

        The text names the ranks that sent the layer to only one of the two workers, or else all ranks that sent it to `one`.
        """
        boxes = self.planned[0]
        notes = self._notes(boxes, deadline)
        transfers = plan_transfers(self.roster.held, wanted_by([notes[key] for key in boxes], self.roster.tensors))
        of_layer = np.array([layer_of(name) == layer for name in transfers.names])[transfers.tensor]
        senders = [set(transfers.source[of_layer & (transfers.destination == worker)].tolist()) for worker in (one, other)]
        ranks = ", ".join(map(str, sorted(senders[0] ^ senders[1] or senders[0])))
        return f"replicas of {layer_text(layer)} on ranks {ranks} differ"

    def _notes(self, boxes: list[str], deadline: Deadline) -> dict[str, dict[str, list[Box]]]:
        return {key: boxes_of_json(self.board.take(key, "a worker's boxes", deadline)) for key in set(boxes)}

    def _check_coverage(self, boxes: list[str], notes: dict[str, dict[str, list[Box]]]) -> None:
        """Raises WeightSyncError, naming the tensor, when no worker of a server takes some part of it."""
        first, known = 0, set()
        for server, count in self.servers.items():
            keys = tuple(boxes[first : first + count])
            first += count
            for name, (shape, _) in () if keys in known else self.roster.tensors.items():
                if left := missing(whole(shape), [box for key in set(keys) for box in notes[key].get(name, ())]):
                    raise WeightSyncError(f"{server}: no worker read {name}{brackets(left[0])}")
            known.add(keys)


@dataclass
class DirectUpdate:
    """One update in progress. Its notes on the board begin with `key`."""

    manifest: Manifest
    transport: PointToPoint
    held: _Held
    invitation: Invitation
    num_ranks: int
    group: str | None  # the group that all ranks are in, if any
    deadline: Deadline
    needed_bytes: int = 0
    checksum_seconds: float = 0.0

    @property
    def servers(self) -> dict[str, int]:
        """All servers, with their numbers of workers: each rank sends to every worker."""
        return self.invitation.servers

    @property
    def key(self) -> str:
        """The prefix of this update's notes on the board."""
        return f"update{self.invitation.attempt}"

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`."""
        t = self.transport
        direct = {
            "host": own_address(server),
            "port": t.board.port,
            "secret": self.invitation.secret,
            "roster": t.roster_key,
            "update": self.key,
            "device": t.device.type,
            "dtype": t.dtype,
            "limit": t.limit,
            "ranks": self.num_ranks,
            "first_worker": self._first(server),
            "seconds": self.deadline.left().total_seconds(),
        }
        return {"version": self.manifest.version, "direct": direct}

    def standing(self, server: str) -> dict[str, str]:
        """Always empty. The errors of the sending ranks name workers that hang."""
        return {}

    def replies(self, server: str) -> list[dict[str, Any]]:
        """Return the reports that the workers of `server` have left so far."""
        first, board = self._first(server), self.transport.board
        found = [board.find(f"{self.key}/report{first + worker}") for worker in range(self.invitation.servers[server])]
        return [report for report in found if report is not None]

    def send(self) -> Given:
        """Send this rank's slices to all workers. When this fails, leave the group, stop all waiting processes, and raise the error."""
        try:
            return self._send()
        except Exception as error:
            let_go(error)
            self.transport.leave_group()
            self.give_up(f"rank {self.transport.ranks.world_rank}: {error}")
            raise

    def give_up(self, why: str) -> None:
        """Leave the reason `why` on the board: every process that waits for a note of this update stops with an error."""
        board, note = self.transport.board, f"{self.key}/stop"
        with contextlib.suppress(WeightSyncError):  # without a board no process waits for long
            if board is not None and not board.has(note):  # keep the first reason
                board.put(note, why)

    def done(self) -> None:
        """Does nothing: the send buffers are already freed."""

    def verify(self, reports: Sequence[dict[str, Any]]) -> None:
        """Check that workers which want the same slices received the same values, from whichever replica.

        Each worker has already compared each slice with the checksum that came with it. Raises WeightSyncError naming layer, ranks and
        workers.
        """
        verify_versions(self.manifest, reports)
        alike: dict[str, tuple[int, dict[str, int]]] = {}  # boxes -> the first worker that wants them, and its checksum per layer
        for report in reports:
            worker = self._first(report["server"]) + report["worker"]
            first, sums = alike.setdefault(self.transport.planned[0][worker], (worker, report["layers"]))
            if differ := [int(layer) for layer, total in report["layers"].items() if sums[layer] != total]:
                told = self.transport.drifted(differ[0], first, worker, self.deadline)
                raise WeightSyncError(f"{told}: {self._name(first)} and {self._name(worker)} received different values")

    def verify_bytes(self, given: int, taken: int) -> None:
        """Raises WeightSyncError unless all ranks together sent, and all workers together received, exactly the bytes that the workers
        need."""
        if not given == taken == self.needed_bytes:
            raise WeightSyncError(f"the ranks sent {given} bytes and the workers received {taken}; expected {self.needed_bytes}")

    def _send(self) -> Given:
        t, rank = self.transport, self.transport.ranks.world_rank
        if t.board is None or t.board.port != self.invitation.port:
            t.board = Board(self.invitation.host, self.invitation.port, self.deadline, self.invitation.secret)
        if rank == 0:
            self._decide()
        members = t.board.take(f"{self.key}/members", "the workers", self.deadline, stop=f"{self.key}/stop")
        mine, self.needed_bytes = t.plan(members["boxes"], self.deadline)
        if t.exchange is None or t.exchange.name != members["group"]:
            t.leave_group()
            world = self.num_ranks + len(members["boxes"])
            t.exchange = Exchange(t.board, members["group"], rank, world, t.device, self.deadline)
        given = 0
        under_way: deque[tuple[list[Pending], list[Parcel]]] = deque()
        for (layer, _), messages in mine.items():
            if len(under_way) == IN_FLIGHT:
                wait(under_way.popleft()[0], self.deadline)
            self.held.go_to(layer)
            parcels = [self._parcel(message) for message in messages]
            under_way.append((t.exchange.send(parcels), parcels))
            given += sum(message.elements for message in messages)
        while under_way:
            wait(under_way.popleft()[0], self.deadline)
        return Given(given * DTYPES[t.dtype].itemsize, self.checksum_seconds)

    def _decide(self) -> None:
        """Publish the members of this update and their group, on rank 0, after every worker has left its boxes on the board."""
        board = self.transport.board
        if not board.has(self.transport.roster_key):
            board.put(self.transport.roster_key, self.transport.roster.as_json())
        workers = range(sum(self.invitation.servers.values()))
        notes = [board.take(f"{self.key}/worker{w}", self._name(w), self.deadline, stop=f"{self.key}/stop") for w in workers]
        keep = self.group and all(note["group"] == self.group for note in notes)
        group = self.group if keep else f"group{self.invitation.attempt}"
        board.put(f"{self.key}/members", {"boxes": [note["boxes"] for note in notes], "group": group})
        before = f"update{self.invitation.attempt - 1}"
        noted, self.transport.num_noted = range(self.transport.num_noted), len(workers)
        board.remove([f"{before}/members", f"{before}/stop", *(f"{before}/{kind}{w}" for w in noted for kind in ("worker", "report"))])

    def _parcel(self, message: Message) -> Parcel:
        """Pack a message: its elements, and a checksum of each slice."""
        dtype = DTYPES[self.manifest.dtype]
        packed, totals = empty_parcel(message, dtype, self.transport.device), []
        elements, sums = opened(packed, message, dtype)
        for item in message.slices:
            place = elements[item.offset : item.offset + size(item.box)]
            total, seconds = copy_checked(place, self.held.read(item.tensor, item.box), item.box)
            totals.append(total - 2**64 * (total >= 2**63))
            self.checksum_seconds += seconds
        sums.copy_(torch.tensor(totals, dtype=torch.int64))
        to, what = self.num_ranks + message.destination, f"sending {contents(message)} to {self._name(message.destination)}"
        return Parcel(packed, to, message.tag, what)

    def _first(self, server: str) -> int:
        """Return the index, over all servers, of this server's first worker."""
        counts = list(self.invitation.servers.values())
        return sum(counts[: list(self.invitation.servers).index(server)])

    def _name(self, worker: int) -> str:
        for url, count in self.invitation.servers.items():
            if worker < count:
                return f"worker {worker} of {url}"
            worker -= count
        raise AssertionError("no such worker")


class _Held:
    """The blocks of this rank, as parts of Hugging Face tensors. Computed or reordered values are cached for one layer."""

    def __init__(self, found: Found):
        self.found = found
        self.blocks: dict[str, list[tuple[Block, str, Tensor]]] = {}
        for name, param, blocks in found:
            for block in blocks:
                same = self.blocks.setdefault(block.name, [])
                if all(block.box != other.box for other, *_ in same):
                    same.append((block, name, param))
        self._layer: int | None = None
        self._values: dict[str, Tensor] = {}  # parameter -> its values
        self._read: dict[tuple[str, Box], Tensor] = {}  # (tensor, box) -> the block in the order of the Hugging Face tensor

    @property
    def keys(self) -> list[tuple[str, tuple[int, ...], Box]]:
        """(tensor, its shape, box) of every block."""
        return [(name, tuple(block.shape), block.box) for name, blocks in self.blocks.items() for block, *_ in blocks]

    def check(self, roster: Roster | None, rank: int) -> None:
        """Raises WeightSyncError when a weight is NaN or infinite, or a block of the roster is missing."""
        for name, param, blocks in self.found:
            if blocks and not all(map(torch.isfinite, param.detach().aminmax())):  # aminmax returns NaN if any value is NaN
                raise WeightSyncError(f"parameter {name} holds NaN or infinity in its part of {blocks[0].name}")
        if roster is None:
            return
        for name, (_, boxes) in roster.tensors.items():
            for box, ranks in boxes.items():
                if rank in ranks and all(block.box != box for block, *_ in self.blocks.get(name, ())):
                    raise WeightSyncError(f"{name} was present in the first sync and is missing now")

    def go_to(self, layer: int) -> None:
        """Drop the cache when `layer` differs from the current layer."""
        if layer != self._layer:
            self._layer = layer
            self._values.clear()
            self._read.clear()

    def read(self, tensor: str, part: Box) -> Tensor:
        """Return the elements of `part` of `tensor`, in the shape of the part and the dtype of the parameter. A block of this rank must
        hold it."""
        block, name, param = next(entry for entry in self.blocks[tensor] if intersect(entry[0].box, part) == part)
        key = tensor, block.box
        if key not in self._read:
            if name not in self._values:
                self._values[name] = param.detach()
            self._read[key] = block.read(self._values[name])
        return self._read[key][tuple(slice(a - o, b - o) for a, b, o in zip(*part, block.box[0], strict=True))]


def _meeting_address(servers: Collection[str]) -> str:
    """Return the address of this host that all `servers`, and ranks on other hosts, can reach; "" when no single address serves all of
    them.

    A server on this host also reaches an address that other hosts reach.
    """
    found = {own_address(url) for url in servers}
    if _has_ranks_elsewhere():
        found.add(socket.gethostbyname(os.environ["MASTER_ADDR"]))
    found = {address for address in found if not address.startswith("127.")} or found
    return found.pop() if len(found) == 1 else ""


def _name_of_this_host() -> str:
    return os.environ["MASTER_ADDR"] if _has_ranks_elsewhere() else socket.gethostname()


def _has_ranks_elsewhere() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")
