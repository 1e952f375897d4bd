"""Weights through shared memory, for trainer ranks and servers on one host.

Every trainer rank writes the blocks it owns to a file; every worker of the engine reads just the slices its loaders copy. Two slots
alternate, so a worker never reads what a rank is writing.
"""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.boxes import size
from megagrpo.bridge.reshard import owners
from megagrpo.bridge.transfers import layer_of
from megagrpo.families.blocks import Block
from megagrpo.rollout.copies import NotFinite, copy_checked
from megagrpo.rollout.engine import Engine
from megagrpo.rollout.shared_weights import ALIGNMENT, DTYPES, Bookmark, Manifest, SharedBlock, SharedTensor, WeightSyncError
from megagrpo.weight_sync.transport import Given, Ranks, key_of
from megagrpo.weight_sync.verification import verify

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megagrpo-"
NUM_SLOTS = 2


class SharedMemory:
    """The transport of a run whose ranks and servers share one host. Making one is collective; `close` removes its files.

    With `seconds`, ranks that have not written their weights so long after another are an error that names them and the tensor.
    """

    def __init__(self, ranks: Ranks, dtype: str, folder: Path = SHARED_MEMORY, seconds: float | None = None):
        self.ranks, self.dtype, self.seconds = ranks, dtype, seconds
        self._published: Slots | None = None
        remove_stale(folder)
        own = str(folder / f"{PREFIX}{_identity(os.getpid())}-{secrets.token_hex(4)}")
        told = ranks.all_gather_objects((socket.gethostname(), own))
        if len(hosts := sorted({host for host, _ in told})) > 1:
            raise ValueError(f"weight sync through shared memory needs all ranks on one host; they are on {', '.join(hosts)}")
        self.folder = Path(told[0][1])
        self._pid = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the files in shared memory. Does nothing a second time, and nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._published = None
        if self.ranks.world_rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    def prepare(self, found: list[tuple[str, Tensor, Sequence[Block]]], version: int, engine: Engine | None) -> FileUpdate:
        """Write this rank's blocks; an update that names those of all ranks. Collective."""
        if self._published is None:
            self._published = self._slots(found)
        blocks: list[tuple[str, tuple[int, ...], SharedBlock]] = []
        problem = None
        try:
            blocks = self._published.write(found, version)
        except (OSError, WeightSyncError) as error:
            problem = f"rank {self.ranks.world_rank}: {error}"
        told = self._all_gather((problem, blocks))
        if problems := [problem for problem, _ in told if problem]:
            raise WeightSyncError("; ".join(problems))
        parts: dict[str, tuple[tuple[int, ...], list[SharedBlock]]] = {}
        for _, blocks in told:
            for name, shape, block in blocks:
                parts.setdefault(name, (shape, []))[1].append(block)
        tensors = {name: SharedTensor(parts[name][0], tuple(parts[name][1])) for name in sorted(parts, key=_by_layer)}
        return FileUpdate(Manifest(version, self.dtype, tensors), self.folder, self.ranks.world_rank, self._published.checksum_seconds)

    def _all_gather(self, written: Any) -> list[Any]:
        if self.seconds is None:
            return self.ranks.all_gather_objects(written)
        try:
            return self.ranks.all_gather_objects(written, self.seconds)
        except TimeoutError as error:
            late = {rank: self.folder / f"rank{rank}.at" for rank in getattr(error, "ranks", [])}
            places = "".join(f"; rank {rank} stands at {Bookmark.read(path)}" for rank, path in late.items() if path.exists())
            raise WeightSyncError(f"phase publish: {error} (rollout.weight_sync_timeout){places}") from error

    def _slots(self, found: list) -> Slots:
        return Slots(found, self.ranks, self.dtype, self.folder)


@dataclass
class FileUpdate:
    """One update in files of `folder`: the manifest at `path`, and each server's reports in a folder of its own."""

    manifest: Manifest
    folder: Path
    rank: int
    checksum_seconds: float = 0.0  # that this rank has spent
    servers: dict[str, int] | None = None  # with their workers, where each has to have its own access
    saved: bool = False

    @property
    def path(self) -> Path:
        """The manifest's file."""
        return self.folder / f"manifest{self.manifest.version % NUM_SLOTS}.json"

    def request(self, server: str) -> dict[str, Any]:
        """What the workers of `server` are told; writes the manifest, and makes room for their reports."""
        replies = self._replies(server)
        shutil.rmtree(replies, ignore_errors=True)
        replies.mkdir(parents=True)
        if not self.saved:
            self.manifest.save(self.path)
            self.saved = True
        return {"manifest": str(self.path), "version": self.manifest.version, "replies": str(replies)}

    def replies(self, server: str) -> list[dict[str, Any]]:
        """What the workers of `server` have reported so far."""
        return [json.loads(path.read_text()) for path in sorted(self._replies(server).glob("worker*.json"))]

    def standing(self, server: str) -> dict[str, str]:
        """Worker -> where it stands, of those that have not reported yet; nothing of those that never saw an update."""
        found = {path.stem.removeprefix("worker"): Bookmark.read(path) for path in sorted(self._replies(server).glob("worker*.at"))}
        return {worker: place for worker, place in found.items() if not (self._replies(server) / f"worker{worker}.json").exists()}

    def send(self) -> Given:
        """Everything lies in shared memory already."""
        blocks = [block for tensor in self.manifest.tensors.values() for block in tensor.blocks if block.rank == self.rank]
        return Given(sum(size(block.box) for block in blocks) * DTYPES[self.manifest.dtype].itemsize, self.checksum_seconds)

    def give_up(self, why: str) -> None:
        """No rank waits for anything."""

    def done(self) -> None:
        """Files are used again."""

    def verify(self, reports: Sequence[dict[str, Any]]) -> None:
        """By the slices that the workers report, with their checksums."""
        verify(self.manifest, reports)

    def verify_bytes(self, given: int, taken: int) -> None:
        """How much is read follows from what the workers keep; `verify` holds that they read everything."""

    def _replies(self, server: str) -> Path:
        return self.folder / "replies" / server.replace("/", "_")


class Slots:
    """This rank's files in shared memory, and which blocks it publishes. Making one is collective."""

    def __init__(self, found: list, ranks: Ranks, dtype: str, folder: Path):
        self.rank, self.dtype, self.folder = ranks.world_rank, DTYPES[dtype], folder
        held = {key_of(block): math.prod(block.block_shape) for _, _, blocks in found for block in blocks}
        owner = owners(ranks.all_gather_objects(list(held.items())))
        self.offsets: dict[tuple, int] = {}  # key of a block -> its place in the file
        self.size = 0
        for key, count in held.items():
            if owner[key] == self.rank:
                self.offsets[key] = self.size
                self.size += -(-count * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.buffers: dict[str, Tensor] = {}  # what blocks call their memory -> its bytes
        self.checksum_seconds = 0.0  # of the last `write`
        self.bookmark: Bookmark | None = None

    def buffer(self, slot: int) -> tuple[str, Tensor]:
        """What blocks call this slot's memory, and its bytes."""
        path = self.folder / f"rank{self.rank}.slot{slot}"
        if str(path) not in self.buffers or not path.exists():
            self.buffers[str(path)] = _allocate(path, self.size)
        return str(path), self.buffers[str(path)]

    def write(self, found: list, weight_version: int) -> list[tuple[str, tuple[int, ...], SharedBlock]]:
        """Cast and copy every owned block; (tensor name, tensor shape, where it lies) of each."""
        self.checksum_seconds = 0.0
        if not self.offsets:
            return []
        memory, buffer = self.buffer(weight_version % NUM_SLOTS)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.bookmark = self.bookmark or Bookmark(self.folder / f"rank{self.rank}.at")
        written = {}
        for name, param, blocks in found:
            self.bookmark.note(f"parameter {name}")
            mine = [block for block in blocks if key_of(block) in self.offsets and key_of(block) not in written]
            values_here = param.detach() if mine else None  # which may have to be computed
            for block in mine:
                key = key_of(block)
                offset, source = self.offsets[key], block.view(values_here)
                count = source.numel() * self.dtype.itemsize
                values = buffer[offset : offset + count].view(self.dtype)
                try:
                    total, seconds = copy_checked(values, source, block.box, finite=True)
                except NotFinite:
                    raise WeightSyncError(f"parameter {name} holds NaN or infinity in its part of {block.name}") from None
                self.checksum_seconds += seconds
                written[key] = (block.name, tuple(block.shape), SharedBlock(self.rank, memory, offset, block.box, total))
        if absent := sorted(set(self.offsets) - set(written)):
            raise WeightSyncError(f"{absent[0][0]} was there at the first sync and is gone now")
        return list(written.values())


def remove_stale(shared_memory: Path) -> None:
    """Remove what trainers that no longer run left in shared memory."""
    for folder in shared_memory.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).split(".")[0]
        if not pid.isdigit() or folder.name.removeprefix(PREFIX).rpartition("-")[0] != _identity(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _identity(pid: int) -> str:
    """The process id with the process's start time, because ids are used again; "" when there is no such process."""
    try:
        return f"{pid}.{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""


def _allocate(path: Path, count: int) -> Tensor:
    """A file of `count` bytes in shared memory, mapped. Space is reserved now: a write to full shared memory would kill the process."""
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


def _by_layer(tensor: str) -> tuple[int, str]:
    """Tensors of one layer together: vLLM buffers every layer that has begun to load until it is complete."""
    return layer_of(tensor), tensor
