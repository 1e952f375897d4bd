"""The shared_memory transport, for trainer ranks and servers on one host.

Every trainer rank writes the blocks it owns to a file, layer by layer: of the replicas of a block, one rank owns it. Every worker of the
engine reads only the slices that its loaders copy, each as soon as it is written. The rank's ledger records its progress
(`transfer/ledger.py`). Two slots alternate, so the next version never overwrites slices that a worker still reads.
"""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagrpo.engine.protocol import Engine
from megagrpo.families.blocks import Block
from megagrpo.families.boxes import Box
from megagrpo.process.progress import SILENT_TASK, Task
from megagrpo.transfer.checksums import NotFinite, check_finite, copy_checked
from megagrpo.transfer.ledger import HEADER, NUM_SLOTS, Ledger, Ledgers, ledger_path
from megagrpo.transfer.manifest import ALIGNMENT, DTYPES, Bookmark, Manifest, SharedBlock, SharedTensor, WeightSyncError
from megagrpo.transfer.plan import layer_of
from megagrpo.transfer.shm_names import SHARED_MEMORY, WEIGHTS, owned, remove_stale
from megagrpo.transfer.slices import owners
from megagrpo.weight_sync.orphaned_files import remove_when_orphaned
from megagrpo.weight_sync.transport import BlockKey, Parameter, Ranks, SendReport, Weight, key_of
from megagrpo.weight_sync.verification import verify

BlockInFile = tuple[BlockKey, int]  # a block, and its offset in bytes
BlockToWrite = tuple[str, Parameter, Block]  # parameter name, parameter, and one block of it


class _Readiness(NamedTuple):
    """What each rank tells the others before an update."""

    problem: str | None
    file: str | None  # the name of its memory for this version
    blocks: list[BlockInFile] | None  # in the first update


class SharedMemory:
    """The transport for ranks and servers on one host. Construction is collective; `close` removes its files.

    Raises ValueError when the ranks are on several hosts. With `seconds`, a rank that has not written its weights this long after another
    rank is an error, which names the rank and the tensor.
    """

    def __init__(self, ranks: Ranks, dtype: str, folder: Path = SHARED_MEMORY, seconds: float | None = None):
        self.ranks, self.dtype, self.seconds = ranks, dtype, seconds
        self._published: Slots | None = None
        self._blocks: list[list[BlockInFile]] = []  # per rank
        self._tensors: dict[int, dict[str, SharedTensor]] = {}  # slot -> tensors and their blocks
        remove_stale(folder)
        proposed = str(folder / owned(WEIGHTS))  # rank 0's folder is used
        everyone = ranks.all_gather_objects((socket.gethostname(), proposed))
        if len(hosts := sorted({host for host, _ in everyone})) > 1:
            raise ValueError(
                f"rollout.weight_sync_transport: shared_memory needs all ranks on one host; they are on {', '.join(hosts)}; use p2p"
            )
        self.folder = Path(everyone[0][1])
        self._pid = os.getpid()
        self._remover = remove_when_orphaned(self.folder) if ranks.world_rank == 0 else None
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the files in shared memory. Does nothing on a second call or in a forked child."""
        if os.getpid() != self._pid:
            return
        if self._published is not None:
            self._published.close()
            self._published = None
        if self._remover is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._remover.kill()
            self._remover.wait()
        atexit.unregister(self.close)

    def prepare(self, parameters: Sequence[Weight], version: int, engine: Engine | None) -> FileUpdate:
        """Check this rank's weights, reserve memory for them, and return an update with the blocks of all ranks. Collective.

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
        manifest = self._manifest([rank.file or "" for rank in everyone], version)
        return FileUpdate(manifest, self.folder, self.seconds, slots, to_write)

    def all_gather(self, value: Any) -> list[Any]:
        """Gather `value` from every rank, in rank order. Raises WeightSyncError naming late ranks, and the parameter each of them is at."""
        if self.seconds is None:
            return self.ranks.all_gather_objects(value)
        try:
            return self.ranks.all_gather_objects(value, self.seconds)
        except TimeoutError as error:
            bookmarks = {rank: self.folder / f"rank{rank}.at" for rank in getattr(error, "ranks", [])}
            stuck_in = "".join(f"; rank {rank} is stuck in: {Bookmark.read(path)}" for rank, path in bookmarks.items() if path.exists())
            raise WeightSyncError(f"phase publish: {error} (rollout.weight_sync_timeout){stuck_in}") from error

    def _manifest(self, files: list[str], version: int) -> Manifest:
        """Return the manifest of `version`; its tensors are built once per slot."""
        slot = version % NUM_SLOTS
        if slot not in self._tensors:
            parts: dict[str, tuple[tuple[int, ...], list[SharedBlock]]] = {}
            for rank, blocks in enumerate(self._blocks):
                for number, ((name, shape, box), offset) in enumerate(blocks):
                    parts.setdefault(name, (shape, []))[1].append(SharedBlock(rank, files[rank], offset, box, number))
            self._tensors[slot] = {name: SharedTensor(parts[name][0], tuple(parts[name][1])) for name in sorted(parts, key=_by_layer)}
        return Manifest(version, self.dtype, self._tensors[slot])

    def _slots(self, parameters: Sequence[Weight]) -> Slots:
        return Slots(parameters, self.ranks, self.dtype, self.folder)


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
    servers: dict[str, int] | None = None  # `cuda_ipc`: url -> number of workers, all of which must take part. None: any server, any time

    @property
    def path(self) -> Path:
        """The path of the manifest."""
        return self.folder / f"manifest{self.manifest.version % NUM_SLOTS}.json"

    def request(self, server: str) -> dict[str, Any]:
        """Return the request for the workers of `server`. Writes the manifest if it does not exist, and empties the server's folder of
        reports."""
        replies = self._replies(server)
        shutil.rmtree(replies, ignore_errors=True)
        replies.mkdir(parents=True)
        if not self.path.exists():
            self.manifest.save(self.path)
        return {"manifest": str(self.path), "version": self.manifest.version, "replies": str(replies), "seconds": self.seconds}

    def replies(self, server: str) -> list[dict[str, Any]]:
        """Return the reports of the workers of `server` so far."""
        return [json.loads(path.read_text()) for path in sorted(self._replies(server).glob("worker*.json"))]

    def activity(self, server: str) -> dict[str, str]:
        """Return worker -> the operation it is in, for workers without a report. Workers that have never seen an update are missing."""
        folder = self._replies(server)
        workers = {path.stem.removeprefix("worker"): path for path in sorted(folder.glob("worker*.at"))}
        return {worker: Bookmark.read(path) for worker, path in workers.items() if not (folder / f"worker{worker}.json").exists()}

    def send(self, task: Task = SILENT_TASK) -> SendReport:
        """Write this rank's blocks, layer by layer as workers want them."""
        return self.slots.write(self.to_write, self.manifest.version, task)

    def give_up(self, why: str) -> None:
        """Does nothing: no rank waits for a server here."""

    def done(self) -> None:
        """Release the parameters. The files are reused."""
        self.to_write.clear()

    def verify(self, reports: Sequence[dict[str, Any]]) -> None:
        """Compare the slices in the workers' reports with the manifest and the ledgers' checksums. Raises WeightSyncError."""
        ledgers = Ledgers(self.folder, self.manifest.version)
        try:
            verify(self.manifest, ledgers.checksums(self.manifest), reports)
        finally:
            ledgers.close()

    def verify_bytes(self, sent: int, received: int) -> None:
        """Does nothing: the number of bytes read depends on the slices that the workers keep. `verify` checks that they read everything."""

    def _replies(self, server: str) -> Path:
        return self.folder / "replies" / server.replace("/", "_")


class Slots:
    """This rank's files in shared memory, and the blocks that this rank publishes. Construction is collective.

    Blocks lie in the files in the order in which they are written: parameter by parameter, as the engine asks for them.
    """

    def __init__(self, parameters: Sequence[Weight], ranks: Ranks, dtype: str, folder: Path):
        self.rank, self.dtype, self.folder = ranks.world_rank, DTYPES[dtype], folder
        elements = {key_of(block): math.prod(block.block_shape) for _, _, blocks in parameters for block in blocks}
        owner = owners(ranks.all_gather_objects(list(elements.items())))
        owned_keys = [{key_of(block): None for block in blocks if owner[key_of(block)] == self.rank} for _, _, blocks in parameters]
        by_parameter = sorted((sorted(keys, key=_position) for keys in owned_keys if keys), key=lambda keys: _position(keys[0]))
        self.blocks: list[BlockInFile] = []
        self.numbers: dict[BlockKey, int] = {}  # key of a block -> its index in `blocks`
        self.size = 0
        for key in (key for keys in by_parameter for key in keys):
            if key not in self.numbers:
                self.numbers[key] = len(self.blocks)
                self.blocks.append((key, self.size))
                self.size += _aligned(elements[key] * self.dtype.itemsize)
        self.buffers: dict[str, Tensor] = {}  # name of a slot's memory in blocks -> its bytes [size] uint8
        self.ledgers: dict[Path, Ledger] = {}
        self.bookmark: Bookmark | None = None

    def close(self) -> None:
        """Close the ledgers."""
        while self.ledgers:
            self.ledgers.popitem()[1].close()

    def checked(self, parameters: Sequence[Weight]) -> list[BlockToWrite]:
        """Check `parameters`, and return the blocks of them that this rank publishes, in the order of its file.

        Raises WeightSyncError when a value is NaN or infinity in the engine's dtype, or when a block is missing.
        """
        to_write: dict[int, BlockToWrite] = {}
        for name, param, blocks in parameters:
            self._note(f"parameter {name}")
            by_number = {self.numbers[key]: block for block in blocks if (key := key_of(block)) in self.numbers}
            by_number = {number: block for number, block in by_number.items() if number not in to_write}
            if not by_number:
                continue
            values = param.detach()  # may be computed on each call, as for merged adapters
            for number, block in by_number.items():
                try:
                    check_finite(block.view(values), self.dtype)
                except NotFinite:
                    raise WeightSyncError(f"parameter {name} holds NaN or infinity in its part of {block.name}") from None
                to_write[number] = name, param, block
        if absent := self.numbers.values() - to_write.keys():
            (name, *_), _ = self.blocks[min(absent)]
            raise WeightSyncError(f"{name} was present in the first sync and is missing now")
        return [to_write[number] for number in range(len(self.blocks))]

    def open(self, weight_version: int) -> str:
        """Reserve memory for a version, reset its ledger, and return the name that blocks use for the memory ("" without blocks)."""
        if not self.blocks:
            return ""
        path = ledger_path(self.folder, self.rank, weight_version)
        if path not in self.ledgers or not path.exists():
            words = _allocate(path, 8 * (HEADER + len(self.blocks))).view(torch.int64).numpy().view(np.uint64)
            self.ledgers[path] = Ledger(path, words)
        self.ledgers[path].begin(weight_version)
        return self.buffer(weight_version % NUM_SLOTS)[0]

    def buffer(self, slot: int) -> tuple[str, Tensor]:
        """Return the path of this slot's file, which is `SharedBlock.file`, and its bytes [size] uint8."""
        path = self.folder / f"rank{self.rank}.slot{slot}"
        if str(path) not in self.buffers or not path.exists():
            self.buffers[str(path)] = _allocate(path, self.size)
        return str(path), self.buffers[str(path)]

    def write(self, to_write: Sequence[BlockToWrite], weight_version: int, task: Task = SILENT_TASK) -> SendReport:
        """Cast and copy every block; workers may read a block as soon as it is written. On an error the ledger withdraws the version."""
        if not to_write:
            return SendReport(0)
        ledger = self.ledgers[ledger_path(self.folder, self.rank, weight_version)]
        buffer = self.buffer(weight_version % NUM_SLOTS)[1]
        source, num_bytes, checksum_seconds = None, 0, 0.0
        task.expect(self.size, "B")
        try:
            for number, (name, param, block) in enumerate(to_write):
                if param is not source:
                    self._note(f"parameter {name}")
                    source, values = param, param.detach()
                view, offset = block.view(values), self.blocks[number][1]
                end = offset + view.numel() * self.dtype.itemsize
                total, seconds = copy_checked(buffer[offset:end].view(self.dtype), view, block.box)
                ledger.note(weight_version, number, total, end)
                num_bytes += end - offset
                task.advance(end - offset)
                checksum_seconds += seconds
        except BaseException:
            ledger.withdraw()
            raise
        return SendReport(num_bytes, checksum_seconds)

    def _note(self, activity: str) -> None:
        """Write what this rank does to its bookmark, which the other ranks read when this rank is late."""
        if self.bookmark is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.bookmark = Bookmark(self.folder / f"rank{self.rank}.at")
        self.bookmark.note(activity)


def _allocate(path: Path, count: int) -> Tensor:
    """Create and map a file of `count` bytes in shared memory, [count] uint8.

    Space is reserved now, because a write to full shared memory would kill the process. Raises WeightSyncError when shared memory is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, count)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path.parent).free
        raise WeightSyncError(
            f"{path.parent.parent} is full: a slot of this rank's weights takes {count / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are "
            "free; enlarge it (docker run --shm-size, mount -o remount,size=) or free some"
        ) from error
    finally:
        os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=count, dtype=torch.uint8)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _position(key: BlockKey) -> tuple[int, str, Box]:
    """Sort key of a block: its tensor, then its position in the tensor."""
    tensor, _, box = key
    return *_by_layer(tensor), box


def _by_layer(tensor: str) -> tuple[int, str]:
    """Sort key that keeps the tensors of a layer together: vLLM buffers every layer that has begun to load until it is complete."""
    return layer_of(tensor), tensor
