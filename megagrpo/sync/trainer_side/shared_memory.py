"""The shared_memory transport, for servers on the hosts of the trainer's ranks.

Every trainer rank writes the blocks it owns to a file, layer by layer: of the replicas of a block, one rank owns it.
Every worker of the engine reads only the slices that its loaders copy, each as soon as it is written. The rank's ledger
records its progress (`sync/wire/ledger.py`). Two slots alternate, so the next version never overwrites slices that a
worker still reads.

On several nodes each node has its own files, with the whole model, for its own servers
(`sync/trainer_side/node_shares.py`).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megagrpo.engine.client import VllmEngine
from megagrpo.models.families.boxes import brackets
from megagrpo.platform.process.ownership import make_folder
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.platform.process.removal import remove, remove_tree
from megagrpo.platform.process.shm_names import FOLDER, SHARED_MEMORY, remove_stale
from megagrpo.sync.trainer_side.node_shares import NodeFiles, Nodes, Transfer
from megagrpo.sync.trainer_side.orphaned_files import remove_when_orphaned
from megagrpo.sync.trainer_side.slots import BlockInFile, BlockToWrite, Slots, by_layer
from megagrpo.sync.trainer_side.transport import Ranks, SendReport, Weight
from megagrpo.sync.trainer_side.verification import verify
from megagrpo.sync.wire.ledger import NUM_SLOTS, Ledgers
from megagrpo.sync.wire.manifest import Bookmark, Manifest, SharedBlock, SharedTensor, WeightSyncError


class _Readiness(NamedTuple):
    """What each rank tells the others before an update."""

    problem: str | None
    file: str | None  # the name of its memory for this version
    blocks: list[BlockInFile] | None  # in the first update


class SharedMemory:
    """The transport for servers on the hosts of the ranks. Construction is collective; `close` removes its files.

    With `nodes` the ranks are on several hosts, each with its own servers. Raises ValueError for ranks on several hosts
    without `nodes`. With `seconds`, a rank that has not written its weights this long after another rank is an error,
    which names the rank and the tensor.
    """

    def __init__(
        self,
        ranks: Ranks,
        dtype: str,
        folder: Path = SHARED_MEMORY,
        seconds: float | None = None,
        nodes: Nodes | None = None,
    ):
        self.ranks, self.dtype, self.seconds = ranks, dtype, seconds
        self._published: Slots | None = None
        self._blocks: list[list[BlockInFile]] = []  # per rank
        self._tensors: dict[tuple[int, int], dict[str, SharedTensor]] = {}  # (slot, node) -> tensors and their blocks
        remove_stale(folder)
        first = nodes.of_ranks.index(nodes.of_ranks[ranks.world_rank]) if nodes else 0  # the first rank of this node
        self._leads, made, problem = first == ranks.world_rank, "", ""
        if self._leads:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path, self._lock = make_folder(FOLDER, folder)
                made = str(path)
            except OSError as error:
                problem = f"{folder} cannot be written to: {error.strerror}"
        everyone: list[tuple[str, str, str]] = ranks.all_gather_objects((socket.gethostname(), made, problem))
        hosts = sorted({host for host, *_ in everyone})
        if nodes is None and len(hosts) > 1:
            problem = f"shared_memory needs all ranks on one host; they are on {', '.join(hosts)}; use p2p"
        if problem := problem or next((problem for *_, problem in everyone if problem), ""):
            if made:
                remove_tree(made)
            raise ValueError(f"rollout.weight_sync_transport: {problem}")
        self.nodes = nodes or Nodes((0,) * len(everyone))
        of_ranks = self.nodes.of_ranks
        self.node = of_ranks[ranks.world_rank]
        self.folders = {node: Path(everyone[of_ranks.index(node)][1]) for node in set(of_ranks)}  # its first rank's
        self.folder = self.folders[self.node]
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._pid = os.getpid()
        self._remover = remove_when_orphaned(self.folder) if self._leads else None
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the files in shared memory. Does nothing on a second call or in a forked child."""
        if os.getpid() != self._pid:
            return
        if self._published is not None:
            self._published.close()
            self._published = None
        if self._remover is not None:
            remove_tree(self.folder)
            os.close(self._lock)
            self._remover.kill()
            self._remover.wait()
            self._remover = None
        atexit.unregister(self.close)

    def prepare(self, parameters: Sequence[Weight], version: int, engine: VllmEngine | None) -> FileUpdate:
        """Check this rank's weights, reserve memory for them, and return an update with the blocks of all ranks.
        Collective.

        Raises WeightSyncError on every rank when any rank has a problem.
        """
        if self._published is None:
            self._published = self._slots(parameters)
        slots, to_write, problem, file = self._published, list[BlockToWrite](), None, None
        try:
            to_write = slots.checked(parameters)
            file = slots.open(version)
        except (OSError, WeightSyncError) as error:
            problem = f"rank {self.ranks.world_rank}: {error}"
        everyone: list[_Readiness] = self.all_gather(_Readiness(problem, file, None if self._blocks else slots.blocks))
        if problems := [rank.problem for rank in everyone if rank.problem]:
            raise WeightSyncError("; ".join(problems))
        self._blocks = self._blocks or [rank.blocks or [] for rank in everyone]
        return self._update([rank.file or "" for rank in everyone], version, slots, to_write)

    def _update(self, files: list[str], version: int, slots: Slots, to_write: list[BlockToWrite]) -> FileUpdate:
        """Return the update of `version`. On several nodes the first rank of each writes what its servers need."""
        update = FileUpdate(self._manifest(files, version, self.node), self.folder, self.seconds, slots, to_write)
        if not self.nodes.many:
            return update
        if self._leads:
            for server in self.nodes.servers_of(self.node):
                FileUpdate.request(update, server)
        self.all_gather(None)  # rank 0 sends requests to all servers next
        if self.ranks.world_rank == 0:
            numbers = [{key: number for number, (key, _) in enumerate(blocks)} for blocks in self._blocks]
            update.crossings = [
                (one, numbers[one.sender][one.key], numbers[one.receiver][one.key]) for one in slots.shares.transfers
            ]
            update.elsewhere = {
                node: NodeFiles(self._manifest(files, version, node), folder, self.nodes.servers_of(node))
                for node, folder in self.folders.items()
                if node != self.node
            }
        return update

    def all_gather(self, value: Any) -> list[Any]:
        """Gather `value` from every rank, in rank order. Raises WeightSyncError naming late ranks, and the parameter
        each of them is at."""
        if self.seconds is None:
            return self.ranks.all_gather_objects(value)
        try:
            return self.ranks.all_gather_objects(value, self.seconds)
        except TimeoutError as error:
            bookmarks = {rank: self.folder / f"rank{rank}.at" for rank in getattr(error, "ranks", [])}
            stuck_in = "".join(
                f"; rank {rank} is stuck in: {Bookmark.read(path)}" for rank, path in bookmarks.items() if path.exists()
            )
            raise WeightSyncError(f"phase publish: {error} (rollout.weight_sync_timeout){stuck_in}") from error

    def _manifest(self, files: list[str], version: int, node: int) -> Manifest:
        """Return the manifest of `version` for the servers of `node`; its tensors are built once per slot."""
        slot = version % NUM_SLOTS, node
        if slot not in self._tensors:
            parts: dict[str, tuple[tuple[int, ...], list[SharedBlock]]] = {}
            for rank, blocks in enumerate(self._blocks):
                if self.nodes.of_ranks[rank] != node:
                    continue
                for number, ((name, shape, box), offset) in enumerate(blocks):
                    parts.setdefault(name, (shape, []))[1].append(SharedBlock(rank, files[rank], offset, box, number))
            self._tensors[slot] = {
                name: SharedTensor(parts[name][0], tuple(parts[name][1])) for name in sorted(parts, key=by_layer)
            }
        return Manifest(version, self.dtype, self._tensors[slot])

    def _slots(self, parameters: Sequence[Weight]) -> Slots:
        return Slots(parameters, self.ranks, self.dtype, self.folder, self.nodes)


@dataclass
class FileUpdate:
    """One update in files of `folder`: the manifest at `path`, and a folder of reports per server.

    `to_write` lists the blocks that this rank must write, in order. Workers wait at most `seconds` for a rank.
    """

    manifest: Manifest
    folder: Path
    seconds: float | None
    slots: Slots
    to_write: list[BlockToWrite]
    # rank 0: node -> its files, for all other nodes
    elsewhere: dict[int, NodeFiles] = field(default_factory=dict, kw_only=True)
    # rank 0: with its numbers at both ends
    crossings: list[tuple[Transfer, int, int]] = field(default_factory=list, kw_only=True)
    # rank 0, on several nodes: rank -> checksums of its blocks
    written: list[tuple[int, ...]] = field(default_factory=list, kw_only=True)
    # `cuda_ipc`: url -> number of workers, all of which must take part. None: any server, any time
    servers: dict[str, int] | None = None

    @property
    def path(self) -> Path:
        """The path of the manifest."""
        return self.folder / f"manifest{self.manifest.version % NUM_SLOTS}.json"

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`. Writes the manifest if it does not exist, and empties the
        server's folder of reports."""
        for _, folder, servers in self.elsewhere.values():
            if server in servers:
                return self._order(folder / self.path.name, replies_of(folder, server))
        replies = replies_of(self.folder, server)
        remove(replies)
        replies.mkdir(parents=True)
        if not self.path.exists():
            self.manifest.save(self.path)
        return self._order(self.path, replies)

    def _order(self, manifest: Path, replies: Path) -> dict[str, Any]:
        return {
            "manifest": str(manifest),
            "version": self.manifest.version,
            "replies": str(replies),
            "seconds": self.seconds,
        }

    def reports_by_http(self, server: str) -> bool:
        """Whether the reports of the workers of `server` are on another node."""
        return any(server in files.servers for files in self.elsewhere.values())

    def replies(self, server: str) -> list[dict[str, Any]]:
        """Return the reports of the workers of `server` so far."""
        return [json.loads(path.read_text()) for path in sorted(replies_of(self.folder, server).glob("worker*.json"))]

    def activity(self, server: str) -> dict[str, str]:
        """Return worker -> the operation it is in, for workers without a report. Workers that have never seen an update
        are missing."""
        folder = replies_of(self.folder, server)
        workers = {path.stem.removeprefix("worker"): path for path in sorted(folder.glob("worker*.at"))}
        return {
            worker: Bookmark.read(path)
            for worker, path in workers.items()
            if not (folder / f"worker{worker}.json").exists()
        }

    def send(self, task: Task = SILENT_TASK) -> SendReport:
        """Write this rank's blocks, layer by layer as workers want them."""
        return self.slots.write(self.to_write, self.manifest.version, task)

    def all_sent(self, reports: Sequence[SendReport]) -> None:
        """Keep the checksums of all ranks for `verify`. Raises WeightSyncError when a block changed on its way to
        another node."""
        if not self.elsewhere:
            return
        self.written = [report.checksums for report in reports]
        for one, sent, got in self.crossings:
            if self.written[one.sender][sent] != self.written[one.receiver][got]:
                what = f"{one.key[0]}{brackets(one.key[2])}"
                raise WeightSyncError(
                    f"{what} changed on its way from rank {one.sender} to rank {one.receiver} of another node"
                )

    def give_up(self, why: str) -> None:
        """Does nothing: no rank waits for a server here."""

    def done(self) -> None:
        """Release the parameters. The files are reused."""
        self.to_write.clear()

    def verify(self, reports: Sequence[dict[str, Any]]) -> None:
        """Compare the slices in the workers' reports with the manifest and the ledgers' checksums. Raises
        WeightSyncError."""
        ledgers = Ledgers(self.folder, self.manifest.version)
        try:
            remote = {url for files in self.elsewhere.values() for url in files.servers}
            verify(
                self.manifest,
                ledgers.checksums(self.manifest),
                [report for report in reports if report["server"] not in remote],
            )
        finally:
            ledgers.close()
        for manifest, _, servers in self.elsewhere.values():
            blocks = (
                (name, index, block)
                for name, tensor in manifest.tensors.items()
                for index, block in enumerate(tensor.blocks)
            )
            written = {(name, index): self.written[block.rank][block.number] for name, index, block in blocks}
            verify(manifest, written, [report for report in reports if report["server"] in servers])

    def verify_bytes(self, sent: int, received: int) -> None:
        """Does nothing: the number of bytes read depends on the slices that the workers keep. `verify` checks that they
        read everything."""


def replies_of(folder: Path, server: str) -> Path:
    """Return the folder of the reports of the workers of `server`: worker0.json and so on."""
    return folder / "replies" / server.replace("/", "_")
