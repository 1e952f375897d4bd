"""The p2p transport: trainer ranks send weights directly to workers, by gloo between CPUs or NCCL between GPUs, across
hosts.

Every rank and worker knows which boxes each rank holds and each worker wants, and computes the same plan from this. A
rank packs the slices of one layer for one worker into messages of bounded size, and keeps a few messages in flight.
Replicas of a block share the sending. Every element crosses the wire once per worker that wants it. Plan and process
group are reused until a server or worker is replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagrpo.engine.client import VllmEngine
from megagrpo.models.families.boxes import Box, brackets, missing, size, whole
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.sync.trainer_side.local_blocks import LocalBlocks
from megagrpo.sync.trainer_side.transport import BlockKey, Ranks, SendReport, Weight
from megagrpo.sync.trainer_side.verification import verify_versions
from megagrpo.sync.wire.copy_checksums import Checked, copy_checked
from megagrpo.sync.wire.exchange import Board, Deadline, Exchange, Parcel, Pending, clear_frames, own_address, wait
from megagrpo.sync.wire.manifest import DTYPES, Manifest, WeightSyncError
from megagrpo.sync.wire.message_bytes import describe, empty_message, layer_text, message_views
from megagrpo.sync.wire.messages import IN_FLIGHT, Message, Round, rounds
from megagrpo.sync.wire.notes import DirectRequest, Members, UpdateKeys, content_key
from megagrpo.sync.wire.roster import Roster, WorkerBoxes, boxes_of_json, wanted_by
from megagrpo.sync.wire.sync_plan import layer_of, plan_transfers


@dataclass(frozen=True)
class Invitation:
    """The data that every rank needs for an update: address and secret of rank 0's board, the index of the attempt, and
    the servers."""

    host: str
    port: int
    secret: str = field(repr=False)
    attempt: int
    servers: dict[str, int]  # url -> number of workers


@dataclass(frozen=True)
class SendPlan:
    """The messages that this rank sends, for workers with these boxes."""

    boxes: list[str]  # per worker, the key of the note with its boxes
    rounds: dict[Round, list[Message]]
    needed_bytes: int  # by all workers from all ranks


class _Readiness(NamedTuple):
    """What each rank tells the others before an update."""

    problem: str | None
    invitation: Invitation | None  # of rank 0
    keys: list[BlockKey] | None  # before the first roster
    group: str | None  # the process group that this rank is in


class PointToPoint:
    """The transport for servers with their own GPUs or on other hosts.

    `device` holds this rank's tensors. `seconds` limits one attempt of a sync, `megabytes` the size of one message, in
    MiB.
    """

    def __init__(
        self, ranks: Ranks, dtype: str, device: torch.device, *, seconds: float = 300.0, megabytes: float = 64.0
    ):
        self.ranks, self.dtype, self.device, self.seconds = ranks, dtype, device, seconds
        self.limit = max(1, int(megabytes * 2**20) // DTYPES[dtype].itemsize)  # elements in one message
        self.board: Board | None = None
        self.secret = secrets.token_hex(32)  # only rank 0's secret is used
        self.exchange: Exchange | None = None
        self.roster: Roster | None = None
        self.roster_key = ""
        self.attempts = 0  # on rank 0
        self.num_noted = 0  # number of workers with notes of the last attempt
        self.servers: dict[str, int] = {}  # url -> number of workers, of the servers in the current group
        self.planned: SendPlan | None = None

    def close(self) -> None:
        """Leave the group and the board."""
        self.leave_group()
        self.board = None

    def leave_group(self) -> None:
        """Leave the group; workers that wait for this rank get an error. The next sync forms a new group."""
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    def prepare(self, parameters: Sequence[Weight], version: int, engine: VllmEngine | None) -> DirectUpdate:
        """Check the weights and agree on the servers that take part. Collective.

        Raises WeightSyncError on every rank when any rank has a problem.
        """
        problem, invitation, keys = None, None, None
        try:
            blocks = LocalBlocks(parameters)
            blocks.check(self.roster, self.ranks.world_rank, DTYPES[self.dtype])
            if engine is not None:
                invitation = self._invite(engine)
            keys = blocks.keys if self.roster is None else None
        except Exception as error:
            problem = f"rank {self.ranks.world_rank}: {error}"
        readiness = _Readiness(problem, invitation, keys, self.exchange.name if self.exchange is not None else None)
        everyone: list[_Readiness] = self.ranks.all_gather_objects(readiness)
        if problems := [rank.problem for rank in everyone if rank.problem]:
            raise WeightSyncError("; ".join(problems))
        roster = self.roster or self._enroll([rank.keys or [] for rank in everyone])
        invitation, group = (
            everyone[0].invitation,
            everyone[0].group if len({rank.group for rank in everyone}) == 1 else None,
        )
        assert invitation is not None, "rank 0 invites"
        if invitation.servers != self.servers:  # the workers' numbers have changed
            self.leave_group()
            self.servers, group = invitation.servers, None
        manifest = roster.manifest(version, self.dtype)
        return DirectUpdate(manifest, self, blocks, invitation, len(everyone), group, Deadline(self.seconds))

    def all_gather(self, value: Any) -> list[Any]:
        """Gather `value` from every rank, in rank order. No timeout here: each rank's part in an update has its own
        deadline."""
        return self.ranks.all_gather_objects(value)

    def _invite(self, engine: VllmEngine) -> Invitation:
        """Return the invitation, on rank 0: the address of the board, the attempt, and the servers. Starts the board
        when it must move or is missing."""
        servers = engine.workers()
        host = _meeting_address(servers)
        if self.board is None or self.board.host != host:
            self.leave_group()
            self.board = Board(host, 0, Deadline(self.seconds), self.secret, serve=True)
        self.attempts += 1
        return Invitation(host or _name_of_this_host(), self.board.port, self.secret, self.attempts, servers)

    def _enroll(self, keys_of: Sequence[Sequence[BlockKey]]) -> Roster:
        """Make the roster from the blocks of each rank."""
        tensors: dict[str, tuple[tuple[int, ...], dict[Box, list[int]]]] = {}
        for rank, keys in enumerate(keys_of):
            for name, shape, box in keys:
                tensors.setdefault(name, (shape, {}))[1].setdefault(box, []).append(rank)
        self.roster = Roster({name: tensors[name] for name in sorted(tensors, key=lambda name: (layer_of(name), name))})
        self.roster_key = content_key("roster", self.roster.as_json())
        return self.roster

    def plan(self, boxes: list[str], deadline: Deadline) -> SendPlan:
        """Return the messages of this rank. `boxes` holds, per worker, the key of the note with its boxes."""
        if self.planned is None or self.planned.boxes != boxes:
            notes = self._notes(boxes, deadline)
            if self.ranks.world_rank == 0:
                self._check_coverage(boxes, notes)
            roster = self._known_roster()
            wanted = wanted_by([notes[key] for key in boxes], roster.tensors)
            transfers = plan_transfers(roster.holders, wanted)
            needed = sum(size(box) * len(workers) for wants in wanted.values() for box, workers in wants.items())
            messages = rounds(transfers, self.limit, source=self.ranks.world_rank)
            self.planned = SendPlan(boxes, messages, needed * DTYPES[self.dtype].itemsize)
        return self.planned

    def drifted(self, layer: int, one: int, other: int, deadline: Deadline) -> str:
        """Return the error text for workers `one` and `other` that want the same slices of a layer and received
        different values.

        The text names the ranks that sent the layer to only one of the two workers, or else all ranks that sent it to
        `one`.
        """
        assert self.planned is not None, "a report follows a plan"
        boxes, roster = self.planned.boxes, self._known_roster()
        notes = self._notes(boxes, deadline)
        transfers = plan_transfers(roster.holders, wanted_by([notes[key] for key in boxes], roster.tensors))
        of_layer = np.array([layer_of(name) == layer for name in transfers.names])[transfers.tensor]
        senders = [
            set(transfers.source[of_layer & (transfers.destination == worker)].tolist()) for worker in (one, other)
        ]
        ranks = ", ".join(map(str, sorted(senders[0] ^ senders[1] or senders[0])))
        return f"replicas of {layer_text(layer)} on ranks {ranks} differ"

    def _known_roster(self) -> Roster:
        assert self.roster is not None, "`prepare` makes the roster"
        return self.roster

    def _notes(self, boxes: list[str], deadline: Deadline) -> dict[str, WorkerBoxes]:
        assert self.board is not None, "the board is joined first"
        return {key: boxes_of_json(self.board.take(key, "a worker's boxes", deadline)) for key in set(boxes)}

    def _check_coverage(self, boxes: list[str], notes: Mapping[str, WorkerBoxes]) -> None:
        """Raises WeightSyncError, naming the tensor, when no worker of a server takes some part of it."""
        first, checked = 0, set()
        for server, count in self.servers.items():
            keys = tuple(boxes[first : first + count])
            first += count
            if keys in checked:
                continue
            for name, (shape, _) in self._known_roster().tensors.items():
                if uncovered := missing(whole(shape), [box for key in set(keys) for box in notes[key].get(name, ())]):
                    raise WeightSyncError(f"{server}: no worker read {name}{brackets(uncovered[0])}")
            checked.add(keys)


@dataclass
class DirectUpdate:
    """One attempt to send a weight version from this rank to all workers, and its verification."""

    manifest: Manifest
    transport: PointToPoint
    blocks: LocalBlocks
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
    def keys(self) -> UpdateKeys:
        """The keys of this update's notes on the board."""
        return UpdateKeys(f"update{self.invitation.attempt}")

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`."""
        t = self.transport
        direct = DirectRequest(
            host=own_address(server),
            port=self.invitation.port,
            secret=self.invitation.secret,
            roster=t.roster_key,
            update=self.keys.update,
            device=t.device.type,
            dtype=t.dtype,
            limit=t.limit,
            ranks=self.num_ranks,
            first_worker=self._first_worker(server),
            seconds=self.deadline.left().total_seconds(),
        )
        return {"version": self.manifest.version, "direct": asdict(direct)}

    def reports_by_http(self, server: str) -> bool:
        """False: workers report to the board."""
        return False

    def all_sent(self, reports: Sequence[SendReport]) -> None:
        """Does nothing: workers compare checksums with the messages."""

    def activity(self, server: str) -> dict[str, str]:
        """Always empty. The errors of the sending ranks name workers that hang."""
        return {}

    def replies(self, server: str) -> list[dict[str, Any]]:
        """Return the reports that the workers of `server` have left so far."""
        first, board = self._first_worker(server), self._board()
        reports = [board.find(self.keys.report(first + worker)) for worker in range(self.invitation.servers[server])]
        return [report for report in reports if report is not None]

    def send(self, task: Task = SILENT_TASK) -> SendReport:
        """Send this rank's slices to all workers. When this fails, leave the group, stop all waiting processes, and
        raise the error."""
        try:
            return self._send(task)
        except Exception as error:
            clear_frames(error)
            self.transport.leave_group()
            self.give_up(f"rank {self.transport.ranks.world_rank}: {error}")
            raise

    def give_up(self, why: str) -> None:
        """Leave the reason `why` on the board: every process that waits for a note of this update stops with an
        error."""
        board = self.transport.board
        with contextlib.suppress(WeightSyncError):  # without a board no process waits for long
            if board is not None and not board.has(self.keys.stop):  # keep the first reason
                board.put(self.keys.stop, why)

    def done(self) -> None:
        """Does nothing: the send buffers are already freed."""

    def verify(self, reports: Sequence[dict[str, Any]]) -> None:
        """Check that workers which want the same slices received the same values, from whichever replica.

        Each worker has already compared each slice with the checksum that came with it. Raises WeightSyncError naming
        layer, ranks and workers.
        """
        verify_versions(self.manifest, reports)
        boxes = self.transport.planned.boxes if self.transport.planned is not None else []
        # boxes -> the first worker that wants them, and its checksum per layer
        alike: dict[str, tuple[int, dict[str, int]]] = {}
        for report in reports:
            worker = self._first_worker(report["server"]) + report["worker"]
            first, sums = alike.setdefault(boxes[worker], (worker, report["layers"]))
            if differ := [int(layer) for layer, total in report["layers"].items() if sums[layer] != total]:
                problem = self.transport.drifted(differ[0], first, worker, self.deadline)
                raise WeightSyncError(
                    f"{problem}: {self._name(first)} and {self._name(worker)} received different values"
                )

    def verify_bytes(self, sent: int, received: int) -> None:
        """Raises WeightSyncError unless all ranks together sent, and all workers together received, exactly the bytes
        that the workers need."""
        if not sent == received == self.needed_bytes:
            raise WeightSyncError(
                f"the ranks sent {sent} bytes and the workers received {received}; expected {self.needed_bytes}"
            )

    def _send(self, task: Task) -> SendReport:
        """Join the board, agree with the workers, plan, and send."""
        board, rank = self._join_board(), self.transport.ranks.world_rank
        if rank == 0:
            self._decide(board)
        members = Members(**board.take(self.keys.members, "the workers", self.deadline, stop=self.keys.stop))
        plan = self.transport.plan(members.boxes, self.deadline)
        self.needed_bytes = plan.needed_bytes
        return self._send_rounds(plan, self._join_group(board, members), task)

    def _board(self) -> Board:
        assert self.transport.board is not None, "the board is joined first"
        return self.transport.board

    def _join_board(self) -> Board:
        """Connect to the board of the invitation, unless this rank serves it or is connected."""
        t = self.transport
        if t.board is None or t.board.port != self.invitation.port:
            t.board = Board(self.invitation.host, self.invitation.port, self.deadline, self.invitation.secret)
        return t.board

    def _decide(self, board: Board) -> None:
        """Publish the members of this update and their group, on rank 0, after every worker has left its boxes on the
        board."""
        t = self.transport
        if not board.has(t.roster_key):
            board.put(t.roster_key, t._known_roster().as_json())
        workers = range(sum(self.invitation.servers.values()))
        notes = [board.take(self.keys.worker(w), self._name(w), self.deadline, stop=self.keys.stop) for w in workers]
        new_group = f"group{self.invitation.attempt}"
        group = (
            self.group if self.group is not None and all(note["group"] == self.group for note in notes) else new_group
        )
        board.put(self.keys.members, asdict(Members([note["boxes"] for note in notes], group)))
        before, noted, t.num_noted = (
            UpdateKeys(f"update{self.invitation.attempt - 1}"),
            range(t.num_noted),
            len(workers),
        )
        board.remove([before.members, before.stop, *map(before.worker, noted), *map(before.report, noted)])

    def _join_group(self, board: Board, members: Members) -> Exchange:
        """Join the process group of ranks and workers, unless this rank is in it."""
        t = self.transport
        if t.exchange is None or t.exchange.name != members.group:
            t.leave_group()
            world_size = self.num_ranks + len(members.boxes)
            t.exchange = Exchange(board, members.group, t.ranks.world_rank, world_size, t.device, self.deadline)
        return t.exchange

    def _send_rounds(self, plan: SendPlan, exchange: Exchange, task: Task) -> SendReport:
        """Pack and send all messages of the plan, with IN_FLIGHT rounds in flight."""
        elements, item_size = 0, DTYPES[self.transport.dtype].itemsize
        task.expect(item_size * sum(message.elements for messages in plan.rounds.values() for message in messages), "B")
        in_flight: deque[tuple[list[Pending], list[Parcel]]] = deque()
        for (layer, _), messages in plan.rounds.items():
            if len(in_flight) == IN_FLIGHT:
                wait(in_flight.popleft()[0], self.deadline)
            self.blocks.go_to(layer)
            parcels = [self._parcel(message) for message in messages]
            in_flight.append((exchange.send(parcels), parcels))
            of_round = sum(message.elements for message in messages)
            elements += of_round
            task.advance(of_round * item_size)
        while in_flight:
            wait(in_flight.popleft()[0], self.deadline)
        return SendReport(elements * item_size, self.checksum_seconds)

    def _parcel(self, message: Message) -> Parcel:
        """Pack a message: its elements, and a checksum of each slice."""
        dtype, totals = DTYPES[self.manifest.dtype], list[Checked]()
        buffer = empty_message(message, dtype, self.transport.device)
        elements, sums = message_views(buffer, message, dtype)
        for item in message.slices:
            target = elements[item.offset : item.offset + size(item.box)]
            totals.append(copy_checked(target, self.blocks.read(item.tensor, item.box), item.box))
        self.checksum_seconds += sum(seconds for _, seconds in totals)
        # A GPU's checksums stay there: a wait per slice would cost more than the copies.
        sums.copy_(torch.stack([_word(total) for total, _ in totals]))
        peer, what = (
            self.num_ranks + message.destination,
            f"sending {describe(message)} to {self._name(message.destination)}",
        )
        return Parcel(buffer, peer, message.tag, what)

    def _first_worker(self, server: str) -> int:
        """Return the index, over all servers, of this server's first worker."""
        counts = list(self.invitation.servers.values())
        return sum(counts[: list(self.invitation.servers).index(server)])

    def _name(self, worker: int) -> str:
        """Return the description of a worker for errors. `worker` is its index over all servers."""
        for url, count in self.invitation.servers.items():
            if worker < count:
                return f"worker {worker} of {url}"
            worker -= count
        raise AssertionError("no such worker")


def _meeting_address(servers: Collection[str]) -> str:
    """Return the address of this host that all `servers`, and ranks on other hosts, can reach; "" when no single
    address serves all of them.

    A server on this host also reaches an address that other hosts reach.
    """
    addresses = {own_address(url) for url in servers}
    if _has_ranks_elsewhere():
        addresses.add(socket.gethostbyname(os.environ["MASTER_ADDR"]))
    addresses = {address for address in addresses if not address.startswith("127.")} or addresses
    return addresses.pop() if len(addresses) == 1 else ""


def _name_of_this_host() -> str:
    return os.environ["MASTER_ADDR"] if _has_ranks_elsewhere() else socket.gethostname()


def _has_ranks_elsewhere() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1")


def _word(total: int | Tensor) -> Tensor:
    """Return a checksum as a [] int64 tensor."""
    return total if isinstance(total, Tensor) else torch.tensor(total - 2**64 * (total >= 2**63), dtype=torch.int64)
