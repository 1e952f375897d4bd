"""The p2p transport: trainer ranks send weights directly to workers, by gloo (CPUs) or NCCL (GPUs), across hosts.

Every rank and worker knows which boxes each rank holds and each worker wants, and computes the same plan from this. A
rank packs the slices of one layer for one worker into messages of bounded size, and keeps a few messages in flight.
Replicas of a block share the sending. Every element crosses the wire once per worker that wants it. Plan and process
group are reused until a server or worker is replaced.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from megagrpo.config.transport_table import TRANSPORTS
from megagrpo.engine.client import VllmEngine
from megagrpo.models.families.boxes import Box, brackets, missing, size, whole
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.sync.trainer_side.local_blocks import LocalBlocks
from megagrpo.sync.trainer_side.node_shares import BlockKey
from megagrpo.sync.trainer_side.transport import (
    DEFAULT_SETTINGS,
    Ranks,
    SendReport,
    Transport,
    TransportSettings,
    Update,
    Weight,
    of_first_rank,
    own_or_raise,
)
from megagrpo.sync.trainer_side.verification import verify_versions
from megagrpo.sync.wire.copy_checksums import Checked, copy_checked
from megagrpo.sync.wire.exchange import Deadline, Exchange, PeerBuffer, Pending, Store, clear_frames, own_address, wait
from megagrpo.sync.wire.messages import (
    IN_FLIGHT,
    Message,
    Round,
    describe,
    empty_message,
    layer_text,
    message_views,
    rounds,
)
from megagrpo.sync.wire.rank_boxes import RankBoxes, WorkerBoxes, take_boxes
from megagrpo.sync.wire.store_messages import DirectRequest, Members, UpdateKeys, content_key
from megagrpo.sync.wire.sync_plan import layer_of
from megagrpo.sync.wire.tensor_index import ENGINE_DTYPES, WeightSyncError


@dataclass(frozen=True)
class SendPlan:
    """The messages that this rank sends, for workers with these boxes."""

    boxes: list[str]  # per worker, the key of its boxes in the store
    rounds: dict[Round, list[Message]]
    needed_bytes: int  # by all workers from all ranks


class _Offer(NamedTuple):
    """What rank 0 tells the others before an update."""

    request: DirectRequest | None
    servers: dict[str, int]  # url -> number of workers


class PointToPoint(Transport):
    """The transport for servers with own GPUs or on other hosts. `settings.seconds` limits one attempt of a sync."""

    receiver = TRANSPORTS["p2p"].receiver
    refills = False

    def __init__(self, ranks: Ranks, dtype: str, settings: TransportSettings = DEFAULT_SETTINGS):
        super().__init__(ranks, dtype, settings)
        # elements in one message
        self.limit = max(1, int(settings.megabytes * 2**20) // ENGINE_DTYPES[dtype].itemsize)
        self.seconds = settings.seconds or 300.0
        self.store: Store | None = None
        self.secret = secrets.token_hex(32)  # only rank 0's secret is used
        self.exchange: Exchange | None = None
        self.rank_boxes: RankBoxes | None = None
        self.rank_boxes_key = ""
        self.offer: _Offer | None = None  # of the last attempt
        self.attempts = 0  # equal on all ranks
        self.num_members = 0  # number of workers with messages of the last attempt
        self.servers: dict[str, int] = {}  # url -> number of workers, of the servers in the current group
        self.planned: SendPlan | None = None

    def close(self) -> None:
        """Leave the group and the store."""
        self.leave_group()
        self.store = None

    def leave_group(self) -> None:
        """Leave the group; workers that wait for this rank get an error. The next sync forms a new group."""
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    @contextlib.contextmanager
    def prepare(self, weights: Sequence[Weight], version: int, engine: VllmEngine | None) -> Iterator[DirectUpdate]:
        """Check the weights and agree on the servers that take part. Collective.

        Raises WeightSyncError on every rank when any rank has a problem.
        """
        blocks = LocalBlocks(weights)

        def check() -> _Offer:
            blocks.check(self.rank_boxes, self.ranks.world_rank, ENGINE_DTYPES[self.dtype])
            servers = dict(engine.workers()) if engine is not None else {}
            return _Offer(self._request(servers) if servers else None, servers)

        self.offer = of_first_rank(self.ranks, own_or_raise(self.ranks, check), self.offer)
        rank_boxes = self.rank_boxes or self._collect(self.ranks.all_gather_objects(blocks.keys))
        request, servers = self.offer
        assert request is not None, "rank 0 makes the request"
        self.attempts += 1
        group = self._common_group()
        if servers != self.servers:  # the workers' numbers have changed
            self.leave_group()
            self.servers, group = servers, None
        yield DirectUpdate(
            index=rank_boxes.index(version, self.dtype),
            receiver=self.receiver,
            servers=servers,
            transport=self,
            blocks=blocks,
            common=replace(request, attempt=self.attempts, rank_boxes=self.rank_boxes_key, ranks=self.ranks.world_size),
            group=group,
            deadline=Deadline(self.seconds),
        )

    def _request(self, servers: dict[str, int]) -> DirectRequest:
        """Return the request of the attempts, on rank 0, with the address for the other ranks. Starts the store when
        it must move or is missing."""
        host = _meeting_address(servers)
        if self.store is None or self.store.host != host:
            self.leave_group()
            self.store = Store(host, 0, Deadline(self.seconds), self.secret, serve=True)
        return DirectRequest(
            host=host or (ENVIRONMENT["MASTER_ADDR"] if _has_ranks_elsewhere() else socket.gethostname()),
            port=self.store.port,
            secret=self.secret,
            attempt=0,  # set for each attempt
            device=self.settings.device.type,
            dtype=self.dtype,
            limit=self.limit,
        )

    def _common_group(self) -> str | None:
        """Return the process group that all ranks are in, if any. Collective."""
        name = self.exchange.name if self.exchange is not None else None
        number = crc32(name.encode()) if name else 0
        largest, smallest = self.ranks.all_reduce(torch.tensor([number, -number]), "max").tolist()
        return name if largest == -smallest else None

    def _collect(self, keys_of: Sequence[Sequence[BlockKey]]) -> RankBoxes:
        """Return the boxes of all ranks, from the blocks of each rank."""
        tensors: dict[str, tuple[tuple[int, ...], dict[Box, list[int]]]] = {}
        for rank, keys in enumerate(keys_of):
            for name, shape, box in keys:
                tensors.setdefault(name, (shape, {}))[1].setdefault(box, []).append(rank)
        in_order = sorted(tensors, key=lambda name: (layer_of(name), name))
        self.rank_boxes = RankBoxes({name: tensors[name] for name in in_order})
        self.rank_boxes_key = content_key("rank_boxes", self.rank_boxes.as_json())
        return self.rank_boxes

    def join_store(self, request: DirectRequest, deadline: Deadline) -> Store:
        """Return the store of the request. Connects to it, unless this rank serves it or is connected."""
        if self.store is None or self.store.port != request.port:
            self.store = Store(request.host, request.port, deadline, request.secret)
        return self.store

    def plan(self, store: Store, boxes: list[str], deadline: Deadline) -> SendPlan:
        """Return the messages of this rank. `boxes` holds, per worker, the key of its boxes in the store."""
        if self.planned is None or self.planned.boxes != boxes:
            workers = take_boxes(store, boxes, deadline)
            if self.ranks.world_rank == 0:
                self._check_coverage(boxes, workers)
            messages = rounds(self._all_boxes.transfers_to(workers), self.limit, source=self.ranks.world_rank)
            needed = sum(size(box) for worker in workers for of_tensor in worker.values() for box in of_tensor)
            self.planned = SendPlan(boxes, messages, needed * ENGINE_DTYPES[self.dtype].itemsize)
        return self.planned

    def drifted(self, store: Store, layer: int, workers: tuple[int, int], deadline: Deadline) -> str:
        """Return the error text for two workers that want the same slices of a layer and received different values.

        The text names the ranks that sent the layer to only one of the workers, or else all that sent it to the first.
        """
        assert self.planned is not None, "a report follows a plan"
        transfers = self._all_boxes.transfers_to(take_boxes(store, self.planned.boxes, deadline))
        of_layer = np.array([layer_of(name) == layer for name in transfers.names])[transfers.tensor]
        senders = [set(transfers.source[of_layer & (transfers.destination == worker)].tolist()) for worker in workers]
        ranks = ", ".join(map(str, sorted(senders[0] ^ senders[1] or senders[0])))
        return f"replicas of {layer_text(layer)} on ranks {ranks} differ"

    @property
    def _all_boxes(self) -> RankBoxes:
        assert self.rank_boxes is not None, "`prepare` collects the boxes"
        return self.rank_boxes

    def _check_coverage(self, keys: list[str], workers: Sequence[WorkerBoxes]) -> None:
        """Raises WeightSyncError, naming the tensor, when no worker of a server takes some part of it."""
        first, checked = 0, set()
        for server, count in self.servers.items():
            of_server = tuple(keys[first : first + count])
            boxes = dict(zip(of_server, workers[first : first + count], strict=True)).values()
            first += count
            if of_server in checked:
                continue
            for name, (shape, _) in self._all_boxes.tensors.items():
                if uncovered := missing(whole(shape), [box for worker in boxes for box in worker.get(name, ())]):
                    raise WeightSyncError(f"{server}: no worker read {name}{brackets(uncovered[0])}")
            checked.add(of_server)


@dataclass(kw_only=True)
class DirectUpdate(Update):
    """One attempt to send a weight version from this rank to all workers, and its verification."""

    transport: PointToPoint
    blocks: LocalBlocks
    common: DirectRequest  # of all servers
    group: str | None  # the group that all ranks are in, if any
    deadline: Deadline
    needed_bytes: int = 0
    checksum_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.keys = self.common.keys
        # (server, index of the worker within it), over all servers
        self.workers = [(url, index) for url, count in self.transport.servers.items() for index in range(count)]

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`."""
        seconds = self.deadline.left().total_seconds()
        first = self.workers.index((server, 0))
        return asdict(replace(self.common, host=own_address(server), first_worker=first, seconds=seconds))

    def reports(self, server: str) -> list[dict[str, Any]]:
        """Return the reports that the workers of `server` have left so far."""
        store = self._store()
        reports = [
            store.find(self.keys.report(number)) for number, (url, _) in enumerate(self.workers) if url == server
        ]
        return [report for report in reports if report is not None]

    def send(self, task: Task = SILENT_TASK) -> SendReport:
        """Send this rank's slices to all workers. When this fails, leave the group, stop all waiting processes, and
        raise the error."""
        try:
            store, rank = self._store(), self.transport.ranks.world_rank
            if rank == 0:
                self._decide(store)
            members = Members(**store.wait_for(self.keys.members, "the workers", self.deadline, self._stopped))
            plan = self.transport.plan(store, members.boxes, self.deadline)
            self.needed_bytes = plan.needed_bytes
            return self._send_rounds(plan, self._join_group(store, members), task)
        except Exception as error:
            clear_frames(error)
            self.transport.leave_group()
            with contextlib.suppress(WeightSyncError):  # without a store no process waits for long
                if not self._store().has(self.keys.stop):  # keep the first reason
                    self._store().put(self.keys.stop, f"rank {self.transport.ranks.world_rank}: {error}")
            raise

    def verify(self, sent: Sequence[SendReport], reports: Sequence[dict[str, Any]]) -> None:
        """Check that workers which want the same slices received the same values, from whichever replica, and that all
        ranks together sent exactly the bytes that all workers need and received.

        Each worker has already compared slices with checksums. Raises WeightSyncError naming layer, ranks and workers.
        """
        verify_versions(self.index, reports)
        boxes = self.transport.planned.boxes if self.transport.planned is not None else []
        # boxes -> the first worker that wants them, and its checksum per layer
        alike: dict[str, tuple[int, dict[str, int]]] = {}
        for report in reports:
            worker = self.workers.index((report["server"], report["worker"]))
            first, sums = alike.setdefault(boxes[worker], (worker, report["layers"]))
            if differ := [int(layer) for layer, total in report["layers"].items() if sums[layer] != total]:
                problem = self.transport.drifted(self._store(), differ[0], (first, worker), self.deadline)
                raise WeightSyncError(
                    f"{problem}: {self._name(first)} and {self._name(worker)} received different values"
                )
        num_sent, num_received = sum(report.num_bytes for report in sent), sum(report["bytes"] for report in reports)
        if not num_sent == num_received == self.needed_bytes:
            raise WeightSyncError(
                f"the ranks sent {num_sent} bytes and the workers received {num_received}; expected {self.needed_bytes}"
            )

    def _store(self) -> Store:
        return self.transport.join_store(self.common, self.deadline)

    def _stopped(self) -> str | None:
        """Return why this update has failed, if it has: `stopped` on rank 0, or what a process left in the store."""
        reason: str | None = self._store().find(self.keys.stop)
        return reason or self.stopped

    def _decide(self, store: Store) -> None:
        """Publish the members of this update and their group, on rank 0, after every worker has left its boxes."""
        t, attempt = self.transport, self.common.attempt
        if not store.has(t.rank_boxes_key):
            store.put(t.rank_boxes_key, t._all_boxes.as_json())
        joined = [
            store.wait_for(self.keys.worker(number), self._name(number), self.deadline, self._stopped)
            for number in range(len(self.workers))
        ]
        reused = self.group is not None and all(worker["group"] == self.group for worker in joined)
        group = self.group if reused and self.group is not None else f"group{attempt}"
        store.put(self.keys.members, asdict(Members([worker["boxes"] for worker in joined], group)))
        before = UpdateKeys(attempt - 1)
        store.remove([before.members, before.stop])
        store.remove(key(number) for key in (before.worker, before.report) for number in range(t.num_members))
        t.num_members = len(self.workers)

    def _join_group(self, store: Store, members: Members) -> Exchange:
        """Join the process group of ranks and workers, unless this rank is in it."""
        t = self.transport
        if t.exchange is None or t.exchange.name != members.group:
            t.leave_group()
            world_size = self.common.ranks + len(members.boxes)
            t.exchange = Exchange(
                store, members.group, t.ranks.world_rank, world_size, t.settings.device, self.deadline
            )
        return t.exchange

    def _send_rounds(self, plan: SendPlan, exchange: Exchange, task: Task) -> SendReport:
        """Pack and send all messages of the plan, with IN_FLIGHT rounds in flight."""
        num_bytes, item_size = 0, ENGINE_DTYPES[self.index.dtype].itemsize
        sizes = {key: item_size * sum(message.elements for message in made) for key, made in plan.rounds.items()}
        task.expect(sum(sizes.values()), "B")
        in_flight: deque[tuple[list[Pending], list[PeerBuffer]]] = deque()
        for key, messages in plan.rounds.items():
            if len(in_flight) == IN_FLIGHT:
                wait(in_flight.popleft()[0], self.deadline)
            self.blocks.go_to(key[0])
            buffers = [self._packed(message) for message in messages]
            in_flight.append((exchange.send(buffers), buffers))
            num_bytes += sizes[key]
            task.advance(sizes[key])
        while in_flight:
            wait(in_flight.popleft()[0], self.deadline)
        return SendReport(num_bytes, self.checksum_seconds)

    def _packed(self, message: Message) -> PeerBuffer:
        """Pack a message: its elements, and a checksum of each slice."""
        dtype, totals = ENGINE_DTYPES[self.index.dtype], list[Checked]()
        buffer = empty_message(message, dtype, self.transport.settings.device)
        elements, sums = message_views(buffer, message, dtype)
        for item in message.slices:
            target = elements[item.offset : item.offset + size(item.box)]
            totals.append(copy_checked(target, self.blocks.read(item.tensor, item.box), item.box))
        self.checksum_seconds += sum(seconds for _, seconds in totals)
        # A GPU's checksums stay there: a wait per slice would cost more than the copies.
        sums.copy_(torch.stack([total for total, _ in totals]))
        what = f"sending {describe(message)} to {self._name(message.destination)}"
        return PeerBuffer(buffer, self.common.ranks + message.destination, message.tag, what)

    def _name(self, worker: int) -> str:
        """Return the description of a worker for errors. `worker` is its index over all servers."""
        url, index = self.workers[worker]
        return f"worker {index} of {url}"


def _meeting_address(servers: Collection[str]) -> str:
    """Return the address of this host that all `servers`, and ranks on other hosts, can reach; "" when no single
    address serves all of them.

    A server on this host also reaches an address that other hosts reach.
    """
    addresses = {own_address(url) for url in servers}
    if _has_ranks_elsewhere():
        addresses.add(socket.gethostbyname(ENVIRONMENT["MASTER_ADDR"]))
    addresses = {address for address in addresses if not address.startswith("127.")} or addresses
    return addresses.pop() if len(addresses) == 1 else ""


def _has_ranks_elsewhere() -> bool:
    return ENVIRONMENT.get("LOCAL_WORLD_SIZE", "1") != ENVIRONMENT.get("WORLD_SIZE", "1")
