"""The shared_memory transport, for servers on the hosts of the trainer's ranks.

Every trainer rank writes the blocks it owns to a file, layer by layer: of the replicas of a block, one rank owns it.
Every worker of the engine reads only the slices that its loaders copy, each as soon as it is written. The rank's
progress file records how far it is (`sync/wire/progress_file.py`). Two slots alternate, so the next version never
overwrites slices that a worker still reads.

On several nodes each node has its own files, with the whole model, for its own servers
(`sync/trainer_side/node_shares.py`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.config.sections.transport_table import TRANSPORTS
from megagrpo.engine.client import VllmEngine
from megagrpo.families.shared.boxes import brackets
from megagrpo.platform.parallel.host_messages import Reduction
from megagrpo.platform.process.cleanup.ownership import SHARED_MEMORY, OwnFolder
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.sync.trainer_side.node_shares import NodeFiles, Nodes, Transfer
from megagrpo.sync.trainer_side.shared_buffers import BlockInFile, Slots, activity_path, by_layer
from megagrpo.sync.trainer_side.transport import (
    DEFAULT_SETTINGS,
    Ranks,
    SendReport,
    Transport,
    TransportSettings,
    Update,
    Weight,
    own_or_raise,
)
from megagrpo.sync.trainer_side.verification import verify
from megagrpo.sync.wire.progress_file import NUM_SLOTS, ActivityFile
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import SharedBlock, SharedTensor, TensorIndex


class SharedMemory(Transport):
    """The transport for servers on the hosts of the ranks. Construction is collective; `close` removes its files.

    With `settings.nodes` the ranks are on several hosts, each with its own servers. Raises ValueError for ranks on
    several hosts without `nodes`. With `settings.seconds`, a rank that has not written its weights this long after
    another rank is an error, which names the rank and the tensor.
    """

    receiver = TRANSPORTS["shared_memory"].receiver

    def __init__(
        self, ranks: Ranks, dtype: str, settings: TransportSettings = DEFAULT_SETTINGS, *, folder: Path = SHARED_MEMORY
    ):
        super().__init__(ranks, dtype, settings)
        self.untimed_ranks = ranks  # for steps in which one rank may wait for a server
        self._published: Slots | None = None
        self._blocks: list[list[BlockInFile]] = []  # per rank
        self._tensors: dict[tuple[int, int], dict[str, SharedTensor]] = {}  # (slot, node) -> tensors and their blocks
        nodes = settings.nodes
        first = nodes.of_ranks.index(nodes.of_ranks[ranks.world_rank]) if nodes else 0  # the first rank of this node
        self._own, made, problem = None, "", ""
        if first == ranks.world_rank:
            try:
                self._own = OwnFolder(folder)
                made = str(self._own.path)
            except OSError as error:
                problem = f"{folder} cannot be written to: {error.strerror}"
        everyone: list[tuple[str, str, str]] = ranks.all_gather_objects((socket.gethostname(), made, problem))
        hosts = sorted({host for host, *_ in everyone})
        if nodes is None and len(hosts) > 1:
            problem = f"shared_memory needs all ranks on one host; they are on {', '.join(hosts)}; use p2p"
        if problem := problem or next((problem for *_, problem in everyone if problem), ""):
            if self._own is not None:
                self._own.close()
            raise ValueError(f"rollout.weight_sync_transport: {problem}")
        self.nodes = nodes or Nodes((0,) * len(everyone))
        of_ranks = self.nodes.of_ranks
        self.node = of_ranks[ranks.world_rank]
        self.folders = {node: Path(everyone[of_ranks.index(node)][1]) for node in set(of_ranks)}  # its first rank's
        self.folder = self.folders[self.node]
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if settings.seconds is not None:
            self.ranks = TimedRanks(ranks, settings.seconds, self.folder)

    def close(self) -> None:
        """Remove the files in shared memory. Does nothing on a second call."""
        if self._published is not None:
            self._published.close()
            self._published = None
        if self._own is not None:
            self._own.close()

    @contextmanager
    def prepare(self, weights: Sequence[Weight], version: int, engine: VllmEngine | None) -> Iterator[FileUpdate]:
        """Check this rank's weights, reserve memory for them, and return an update with the blocks of all ranks.
        Collective. Raises WeightSyncError on every rank when any rank has a problem."""
        if self._published is None:
            self._published = self._slots(weights)
        slots = self._published

        def reserve() -> None:
            slots.check(weights)
            slots.open(version)

        own_or_raise(self.ranks, reserve)
        self._blocks = self._blocks or self.ranks.all_gather_objects(slots.blocks)
        try:
            yield self._update(version, slots)
        finally:
            slots.to_write.clear()  # releases the parameters; the files are reused

    def _update(self, version: int, slots: Slots) -> FileUpdate:
        """Return the update of `version`. On several nodes the first rank of each writes what its servers need."""
        index = self._index(slots, version, self.node)
        update = FileUpdate(
            index=index, receiver=self.receiver, folder=self.folder, seconds=self.settings.seconds, slots=slots
        )
        if not self.nodes.many:
            return update
        if self._own is not None:
            for server in self.nodes.servers_of(self.node):
                FileUpdate.request(update, server)
        self.ranks.all_reduce(torch.tensor(0))  # rank 0 sends requests to all servers next
        if self.ranks.world_rank == 0:
            numbers = [{key: number for number, (key, _) in enumerate(blocks)} for blocks in self._blocks]
            update.crossings = [
                (one, numbers[one.sender][one.key], numbers[one.receiver][one.key]) for one in slots.shares.transfers
            ]
            update.elsewhere = [
                NodeFiles(self._index(slots, version, node), folder, self.nodes.servers_of(node))
                for node, folder in self.folders.items()
                if node != self.node
            ]
        return update

    def _index(self, slots: Slots, version: int, node: int) -> TensorIndex:
        """Return the index of `version` for the servers of `node`; its tensors are built once per slot."""
        slot = version % NUM_SLOTS, node
        if slot not in self._tensors:
            parts: dict[str, tuple[tuple[int, ...], list[SharedBlock]]] = {}
            for rank, blocks in enumerate(self._blocks):
                if self.nodes.of_ranks[rank] != node:
                    continue
                file = slots.memory_of(rank, slot[0], self.folders[node])
                for number, ((name, shape, box), offset) in enumerate(blocks):
                    parts.setdefault(name, (shape, []))[1].append(SharedBlock(rank, file, offset, box, number))
            self._tensors[slot] = {
                name: SharedTensor(parts[name][0], tuple(parts[name][1])) for name in sorted(parts, key=by_layer)
            }
        return TensorIndex(version, self.dtype, self._tensors[slot])

    def _slots(self, weights: Sequence[Weight]) -> Slots:
        return Slots(weights, self.untimed_ranks, self.dtype, self.folder, self.nodes)


@dataclass(frozen=True)
class TimedRanks:
    """The trainer's ranks; a rank that joins `seconds` after another is an error, which names its current parameter."""

    ranks: Ranks
    seconds: float
    folder: Path

    @property
    def world_rank(self) -> int:
        """Index of this rank."""
        return self.ranks.world_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks.world_size

    def all_reduce(self, values: Tensor, reduction: Reduction = "sum", within: float | None = None) -> Tensor:
        """Like `Layout.all_reduce`. Raises WeightSyncError naming late ranks."""
        with self._naming_late_ranks():
            return self.ranks.all_reduce(values, reduction, self.seconds if within is None else within)

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        """Return the `obj` of rank `source`."""
        return self.ranks.broadcast_object(obj, source)

    def all_gather_objects(self, obj: Any, within: float | None = None) -> list[Any]:
        """Gather `obj` from every rank, in rank order. Raises WeightSyncError naming late ranks."""
        with self._naming_late_ranks():
            return self.ranks.all_gather_objects(obj, self.seconds if within is None else within)

    @contextmanager
    def _naming_late_ranks(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            paths = {rank: activity_path(self.folder, rank) for rank in getattr(error, "ranks", [])}
            stuck_in = "".join(
                f"; rank {rank} is stuck in: {ActivityFile.read(path)}" for rank, path in paths.items() if path.exists()
            )
            raise WeightSyncError(f"phase publish: {error} (rollout.weight_sync_timeout){stuck_in}") from error


@dataclass(kw_only=True)
class FileUpdate(Update):
    """One update in files of `folder`: index, and reports per server. Workers wait at most `seconds` for a rank."""

    folder: Path
    seconds: float | None
    slots: Slots
    # rank 0, on several nodes: the files of all other nodes, and transfers with the block's number at both ends
    elsewhere: list[NodeFiles] = field(default_factory=list)
    crossings: list[tuple[Transfer, int, int]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The path of the index."""
        return self.folder / f"index{self.index.version % NUM_SLOTS}.json"

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`. Writes the index if it does not exist, and empties the
        server's folder of reports; on another node the first rank there has done both."""
        folder = next((files.folder for files in self.elsewhere if server in files.servers), None)
        replies = replies_of(folder or self.folder, server)
        if folder is None:
            remove(replies)
            replies.mkdir(parents=True)
            if not self.path.exists():
                self.index.save(self.path)
        path = (folder or self.folder) / self.path.name
        return {"index": str(path), "replies": str(replies), "seconds": self.seconds}

    def reports(self, server: str) -> list[dict[str, Any]] | None:
        """Return the reports of the workers of `server` so far, and the activity of the others. None for a server on
        another node."""
        if any(server in files.servers for files in self.elsewhere):
            return None
        folder = replies_of(self.folder, server)
        reports = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("worker*.json"))}
        return [*reports.values()] + [
            {"worker": int(path.stem.removeprefix("worker")), "activity": ActivityFile.read(path)}
            for path in sorted(folder.glob("worker*.activity"))
            if path.stem not in reports
        ]

    def send(self, task: Task = SILENT_TASK) -> SendReport:
        """Write this rank's blocks, layer by layer as workers want them."""
        return self.slots.write(self.index.version, task)

    def verify(self, sent: Sequence[SendReport], reports: Sequence[dict[str, Any]]) -> None:
        """Compare the slices in the workers' reports with the index and the ranks' checksums. Raises WeightSyncError,
        also when a block changed on its way to another node."""
        for one, left, arrived in self.crossings:
            if sent[one.sender].checksums[left] != sent[one.receiver].checksums[arrived]:
                what = f"{one.key[0]}{brackets(one.key[2])}"
                raise WeightSyncError(
                    f"{what} changed on its way from rank {one.sender} to rank {one.receiver} of another node"
                )
        remote = {url for files in self.elsewhere for url in files.servers}
        here = {report["server"] for report in reports} - remote
        for index, _, servers in [NodeFiles(self.index, self.folder, sorted(here)), *self.elsewhere]:
            written = {
                (name, number): sent[block.rank].checksums[block.number]
                for name, tensor in index.tensors.items()
                for number, block in enumerate(tensor.blocks)
            }
            verify(index, written, [report for report in reports if report["server"] in servers])


def replies_of(folder: Path, server: str) -> Path:
    """Return the folder of the reports of the workers of `server`: worker0.json and so on."""
    return folder / "replies" / server.replace("/", "_")
