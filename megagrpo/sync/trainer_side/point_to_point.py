"""The p2p transport: trainer ranks send weights directly to workers, by gloo (CPUs) or NCCL (GPUs), across hosts.

Rank 0 makes the plan (`send_plan.py`), in which each rank and worker finds its own messages. A rank packs the slices of
one layer for one worker into messages of bounded size, and keeps a few messages in flight. Replicas of a block share
the sending. Every element crosses the wire once per worker that wants it, from a rank or from another worker. Plan and
process group are reused until a server or worker is replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
from collections import deque
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from megagrpo.config.sections.transport_table import TRANSPORTS
from megagrpo.engine.client import VllmEngine
from megagrpo.families.shared.boxes import size
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.platform.rendezvous.store_exchange import (
    Deadline,
    Exchange,
    PeerBuffer,
    Pending,
    Store,
    clear_frames,
    own_address,
    wait,
)
from megagrpo.sync.trainer_side.local_blocks import LocalBlocks
from megagrpo.sync.trainer_side.send_plan import (
    PlanNews,
    ServerPlan,
    collect_boxes,
    drifted,
    make_plan,
    messages_of,
    worker_names,
)
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
from megagrpo.sync.wire.messages import IN_FLIGHT, Message, Round, describe, empty_message, message_views
from megagrpo.sync.wire.rank_boxes import RankBoxes
from megagrpo.sync.wire.store_messages import Decision, DirectRequest, part_key
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import ENGINE_DTYPES


class _News(NamedTuple):
    """What rank 0 tells the other ranks when the group or the plan is new."""

    group: str
    num_workers: int
    plan: PlanNews | None


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
        self.exchange: Exchange | None = None
        self.group = 0  # the attempt in which the current group was formed; 0 without a group
        self.rank_boxes: RankBoxes | None = None
        self.packed_boxes = ""  # on rank 0
        self.attempts = 0
        self.old_keys: list[str] = []  # on rank 0, the keys of the last attempt in the store
        self.common: DirectRequest | None = None  # of all servers, from the last change of servers or address
        self.secret = secrets.token_hex(32)  # only rank 0's secret is used
        self.servers: dict[str, int] = {}  # url -> number of workers, of the servers in the current group
        self.plan = 0  # the attempt in which the current plan was made; 0 without a plan
        self.rounds: dict[Round, list[Message]] = {}  # of the current plan
        self.server_plan: ServerPlan | None = None  # of the plan that is in the store, on rank 0

    def close(self) -> None:
        """Leave the group and the store."""
        self.leave_group()
        self.store = None

    def leave_group(self) -> None:
        """Leave the group; workers that wait for this rank get an error. The next sync forms a new group."""
        self.group = 0
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    @contextlib.contextmanager
    def prepare(self, weights: Sequence[Weight], version: int, engine: VllmEngine | None) -> Iterator[DirectUpdate]:
        """Check the weights and agree on the servers that take part. Collective.

        Raises WeightSyncError on every rank when any rank has a problem.
        """
        self.attempts += 1
        blocks = LocalBlocks(weights)

        def check() -> tuple[DirectRequest | None, dict[str, int]]:
            blocks.check(self.rank_boxes, self.ranks.world_rank, ENGINE_DTYPES[self.dtype])
            servers = dict(engine.workers()) if engine is not None else {}
            return self._request(servers) if servers else None, servers

        own = own_or_raise(self.ranks, check)
        self.common, servers = of_first_rank(self.ranks, own, (self.common, self.servers))
        if servers != self.servers:  # the workers' numbers have changed
            self.leave_group()
            self.servers, self.plan = servers, 0
        mine = torch.tensor([self.group, -self.group, self.plan, -self.plan])
        group, minus_group, plan, minus_plan = self.ranks.all_reduce(mine, "max").tolist()
        if plan != -minus_plan:  # a rank failed before it had the plan
            self.plan = 0
        assert self.common is not None, "rank 0 makes the request"
        if self.rank_boxes is None:
            self.rank_boxes = collect_boxes(self.ranks, blocks.keys)
            self.packed_boxes = self.rank_boxes.packed() if self.ranks.world_rank == 0 else ""
        yield DirectUpdate(
            index=self.rank_boxes.index(version, self.dtype),
            receiver=self.receiver,
            servers=self.servers,
            transport=self,
            blocks=blocks,
            common=replace(self.common, attempt=self.attempts, rank_boxes=self.packed_boxes),
            group=f"group{group}" if group and group == -minus_group else "",
            deadline=Deadline(self.seconds),
        )

    def _request(self, servers: dict[str, int]) -> DirectRequest:
        """Return the request of an attempt, on rank 0, with the address for the other ranks. Starts the store when it
        must move or is missing."""
        host = _meeting_address(servers)
        if self.store is None or self.store.host != host:
            self.leave_group()
            self.store, self.plan = Store(host, 0, Deadline(self.seconds), self.secret, serve=True), 0
        return DirectRequest(
            host=host or (ENVIRONMENT["MASTER_ADDR"] if _has_ranks_elsewhere() else socket.gethostname()),
            port=self.store.port,
            secret=self.secret,
            attempt=0,
            device=self.settings.device.type,
            dtype=self.dtype,
            limit=self.limit,
            ranks=self.ranks.world_size,
        )

    def join_store(self, request: DirectRequest, deadline: Deadline) -> Store:
        """Return the store of the request. Connects to it, unless this rank serves it or is connected."""
        if self.store is None or self.store.port != request.port:
            self.store = Store(request.host, request.port, deadline, request.secret)
        return self.store

    def follow(self, news: PlanNews, tensors: Container[str]) -> None:
        """Take over a plan: find this rank's messages. `tensors` are the tensors of this rank."""
        assert self.rank_boxes is not None, "`prepare` collects the boxes"
        self.rounds = messages_of(news, self.rank_boxes, self.ranks.world_rank, tensors, self.limit)
        self.plan = news.number


@dataclass(kw_only=True)
class DirectUpdate(Update):
    """One attempt to send a weight version from this rank to all workers, and its verification."""

    transport: PointToPoint
    blocks: LocalBlocks
    common: DirectRequest  # of all servers
    group: str  # the group that all ranks are in, if any
    deadline: Deadline
    checksum_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.keys, servers = self.common.keys, self.transport.servers
        self.workers = worker_names(servers)  # over all servers
        # url -> index of the server's first worker, over all servers
        self.first_worker = dict(zip(servers, itertools.accumulate(servers.values(), initial=0), strict=False))

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`."""
        seconds, first = self.deadline.left().total_seconds(), self.first_worker[server]
        return asdict(replace(self.common, host=own_address(server), first_worker=first, seconds=seconds))

    def reports(self, server: str) -> list[dict[str, Any]]:
        """Return the reports that the workers of `server` have left so far."""
        store, first = self._store(), self.first_worker[server]
        keys = [self.keys.report(first + index) for index in range(self.transport.servers[server])]
        return store.find_all([key for key in keys if store.has(key)])

    def send(self, task: Task = SILENT_TASK) -> SendReport:
        """Send this rank's slices to all workers. When this fails, leave the group, and raise the error."""
        t = self.transport
        try:
            news = own_or_raise(t.ranks, self._decide if t.ranks.world_rank == 0 else lambda: None)
            news = of_first_rank(t.ranks, news, None)
            if news is not None:
                if news.plan is not None:
                    t.follow(news.plan, self.blocks.blocks)
                self._join_group(news)
            assert t.exchange is not None, "the first decision is news"
            return self._send_rounds(t.exchange, task)
        except Exception as error:
            clear_frames(error)
            t.leave_group()
            raise

    def verify(self, sent: Sequence[SendReport], reports: Sequence[dict[str, Any]]) -> None:
        """Check that workers which want the same slices received the same values, from whichever replica, and that all
        ranks, and workers that passed weights on, together sent exactly the bytes that all workers need and received.

        Each worker has already compared slices with checksums. Raises WeightSyncError naming layer, ranks and workers.
        """
        verify_versions(self.index, reports)
        t, plan = self.transport, self.transport.server_plan
        assert plan is not None and t.rank_boxes is not None, "reports follow a plan"
        # boxes -> the first worker that wants them, and its checksum per layer
        alike: dict[str, tuple[int, dict[str, int]]] = {}
        for report in reports:
            worker = self.first_worker[report["server"]] + report["worker"]
            first, sums = alike.setdefault(plan.boxes[worker], (worker, report["layers"]))
            if differ := [int(layer) for layer, total in report["layers"].items() if sums[layer] != total]:
                problem = drifted(plan, t.rank_boxes, self._store(), differ[0], (first, worker))
                who = f"{self.workers[first]} and {self.workers[worker]}"
                raise WeightSyncError(f"{problem}: {who} received different values")
        num_sent = sum(report.num_bytes for report in sent) + sum(report["relayed"] for report in reports)
        num_received = sum(report["bytes"] for report in reports)
        needed = plan.elements * ENGINE_DTYPES[self.index.dtype].itemsize
        if not num_sent == num_received == needed:
            raise WeightSyncError(f"{num_sent} bytes were sent and {num_received} received; expected {needed}")

    def _store(self) -> Store:
        return self.transport.join_store(self.common, self.deadline)

    def _decide(self) -> _News | None:
        """Publish the decision about this update, on rank 0, after every worker has left its boxes. Return what is new
        for the other ranks, if anything. Workers that wait for the decision get the error when this fails."""
        t, attempt, store = self.transport, self.common.attempt, self._store()
        store.remove(t.old_keys)
        keys = [self.keys.worker(number) for number in range(len(self.workers))]
        t.old_keys = [self.keys.decision, *keys, *map(self.keys.report, range(len(keys)))]
        try:
            joined = store.take_all(keys, self.workers, self.deadline, lambda: self.stopped)
            plan = self._plan_for([worker["boxes"] for worker in joined])
            reused = self.group and all(worker["group"] == self.group for worker in joined)
            group = self.group if reused else f"group{attempt}"
            number = plan.number if plan is not None else t.plan
            store.put(self.keys.decision, asdict(Decision(number, group, len(keys))))
        except Exception as error:
            with contextlib.suppress(WeightSyncError):
                store.put(self.keys.decision, asdict(Decision(stop=f"rank 0: {error}")))
            raise
        return None if reused and plan is None else _News(group, len(keys), plan)

    def _plan_for(self, boxes: list[str]) -> PlanNews | None:
        """Return the plan for workers whose boxes have these keys, or None when the current plan is for them."""
        t, old, store = self.transport, self.transport.server_plan, self._store()
        assert t.rank_boxes is not None, "`prepare` collects the boxes"
        if old is not None and old.number == t.plan and old.boxes == boxes:
            return None
        relayed = t.ranks.world_size if t.settings.relay else 0
        t.server_plan, plan = make_plan(self.common.attempt, t.rank_boxes, store, boxes, t.servers, relayed)
        if old is not None:
            store.remove(part_key(old.number, worker) for worker in range(len(old.boxes)))
        return plan

    def _join_group(self, news: _News) -> None:
        """Join the process group of ranks and workers, unless this rank is in it."""
        t = self.transport
        if t.exchange is None or t.exchange.name != news.group:
            t.leave_group()
            rank, size = t.ranks.world_rank, t.ranks.world_size + news.num_workers
            t.exchange = Exchange(self._store(), news.group, rank, size, t.settings.device, self.deadline)
            t.group = self.common.attempt

    def _send_rounds(self, exchange: Exchange, task: Task) -> SendReport:
        """Pack and send all messages of the plan, with IN_FLIGHT rounds in flight."""
        planned, num_bytes, item_size = self.transport.rounds, 0, ENGINE_DTYPES[self.index.dtype].itemsize
        sizes = {key: item_size * sum(message.elements for message in made) for key, made in planned.items()}
        task.expect(sum(sizes.values()), "B")
        in_flight: deque[tuple[list[Pending], list[PeerBuffer]]] = deque()
        try:
            for key, messages in planned.items():
                if len(in_flight) == IN_FLIGHT:
                    wait(in_flight.popleft()[0], self.deadline)
                self.blocks.go_to(key[0])
                buffers = [self._packed(message) for message in messages]
                in_flight.append((exchange.send(buffers), buffers))
                num_bytes += sizes[key]
                task.advance(sizes[key])
            while in_flight:
                wait(in_flight.popleft()[0], self.deadline)
        finally:
            exchange.cancel(pending for of_round, _ in in_flight for pending in of_round)
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
        what = f"sending {describe(message)} to {self.workers[message.destination]}"
        return PeerBuffer(buffer, self.common.ranks + message.destination, message.tag, what)


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
