"""Moves the policy's weights to the engine, shard to shard, and proves that they arrived.

Every trainer rank writes the blocks it owns to shared memory; every worker of the engine reads just the slices its loaders copy. No
tensor is gathered. Two slots alternate, so a worker never reads what a rank is writing. An update counts only after its reports have
been verified: each element of each tensor was read, the checksums of what was read equal those of what was written, and the version is
the one that was sent. Until then the engine stays paused.
"""

from __future__ import annotations

import atexit
import errno
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megagrpo.boxes import Box, brackets, missing, size, whole
from megagrpo.bridge.reshard import owners
from megagrpo.families.blocks import Block
from megagrpo.rollout.engine import Engine
from megagrpo.rollout.shared_weights import ALIGNMENT, DTYPES, Manifest, SharedBlock, SharedTensor, WeightSyncError, checksum

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megagrpo-"
NUM_SLOTS = 2


class Ranks(Protocol):
    """The trainer's ranks, as `megagrpo.parallel.layout.Layout`."""

    world_rank: int

    def all_gather_objects(self, obj: Any) -> list[Any]: ...


Weights = Iterable[tuple[str, Tensor, Sequence[Block]]]


@dataclass(frozen=True)
class SyncReport:
    """What one sync took. Bytes are counted over all ranks and all workers."""

    weight_version: int
    publish_seconds: float
    load_seconds: float
    total_seconds: float
    bytes_published: int
    bytes_read: int


class WeightSync:
    """Pushes weights from all ranks to the engine. Every rank makes one and calls `push`; only rank 0's `engine` is used.

    `dtype` is the engine's, "float32" or "bfloat16": weights are cast while they are written. All ranks and servers must share one
    host. A context manager; `close` removes what it put into shared memory.
    """

    def __init__(self, engine: Engine | None, ranks: Ranks, dtype: str, *, shared_memory: Path = SHARED_MEMORY):
        if dtype not in DTYPES:
            raise ValueError(f"weight sync: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        assert engine is not None or ranks.world_rank > 0, "rank 0 drives the engine"
        self.engine, self.ranks, self.dtype = engine, ranks, dtype
        self._published: _Slots | None = None
        remove_stale(shared_memory)
        folder = str(shared_memory / f"{PREFIX}{_identity(os.getpid())}-{secrets.token_hex(4)}")
        told = ranks.all_gather_objects((socket.gethostname(), folder))
        if len(hosts := sorted({host for host, _ in told})) > 1:
            raise ValueError(f"weight sync through shared memory needs all ranks on one host; they are on {', '.join(hosts)}")
        self.folder = Path(told[0][1])
        self._pid = os.getpid()
        atexit.register(self.close)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files in shared memory. Does nothing a second time, and nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._published = None
        if self.ranks.world_rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    @torch.no_grad()
    def push(self, found: Weights, weight_version: int) -> SyncReport:
        """Give the engine the parameters as they are now, as `weight_version`. Collective.

        `found` is what `megagrpo.bridge.families.blocks` yields: (parameter name, parameter, its blocks); the same parameters on every
        call. Raises WeightSyncError on every rank when any part fails: the engine is paused then, and `push` may be called again.
        """
        started = time.perf_counter()
        manifest = self._publish(list(found), weight_version)
        published = time.perf_counter()
        outcome = None
        if self.ranks.world_rank == 0:
            outcome = self._deliver(manifest)
        outcome = self.ranks.all_gather_objects(outcome)[0]
        if isinstance(outcome, str):
            raise WeightSyncError(outcome)
        ended = time.perf_counter()
        return SyncReport(weight_version, published - started, ended - published, ended - started, manifest.num_bytes, outcome)

    def _publish(self, found: list[tuple[str, Tensor, Sequence[Block]]], weight_version: int) -> Manifest:
        """Write this rank's blocks; the manifest of all ranks' blocks."""
        if self._published is None:
            self._published = _Slots(found, self.ranks, self.dtype, self.folder)
        blocks: list[tuple[str, tuple[int, ...], SharedBlock]] = []
        problem = None
        try:
            blocks = self._published.write(found, weight_version)
        except (OSError, WeightSyncError) as error:
            problem = f"rank {self.ranks.world_rank}: {error}"
        told = self.ranks.all_gather_objects((problem, blocks))
        if problems := [problem for problem, _ in told if problem]:
            raise WeightSyncError("; ".join(problems))
        parts: dict[str, tuple[tuple[int, ...], list[SharedBlock]]] = {}
        for _, blocks in told:
            for name, shape, block in blocks:
                parts.setdefault(name, (shape, []))[1].append(block)
        tensors = {name: SharedTensor(shape, tuple(blocks)) for name, (shape, blocks) in sorted(parts.items(), key=_by_layer)}
        return Manifest(weight_version, self.dtype, tensors)

    def _deliver(self, manifest: Manifest) -> int | str:
        """Drive the engine on rank 0: bytes that were read, or what went wrong. It must not raise, for the other ranks wait."""
        try:
            path = self.folder / f"manifest{manifest.version % NUM_SLOTS}.json"
            manifest.save(path)
            reports = self.engine.load_weights(path, manifest.version, self.folder / "replies")
            verify(manifest, reports)
            self.engine.resume(manifest.version)
        except Exception as error:
            text = str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
            return f"weight version {manifest.version} did not reach the engine, which stays paused: {text}"
        return sum(report["bytes"] for report in reports)


class _Slots:
    """This rank's files in shared memory, and which blocks it publishes. Making one is collective."""

    def __init__(self, found: list, ranks: Ranks, dtype: str, folder: Path):
        self.rank, self.dtype, self.folder = ranks.world_rank, DTYPES[dtype], folder
        held = {_key(block): math.prod(block.block_shape) for _, _, blocks in found for block in blocks}
        owner = owners(ranks.all_gather_objects(list(held.items())))
        self.offsets: dict[tuple, int] = {}  # key of a block -> its place in the file
        self.size = 0
        for key, count in held.items():
            if owner[key] == self.rank:
                self.offsets[key] = self.size
                self.size += -(-count * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.buffers: dict[int, Tensor] = {}

    def write(self, found: list, weight_version: int) -> list[tuple[str, tuple[int, ...], SharedBlock]]:
        """Cast and copy every owned block; (tensor name, tensor shape, where it lies) of each."""
        if not self.offsets:
            return []
        slot = weight_version % NUM_SLOTS
        path = self.folder / f"rank{self.rank}.slot{slot}"
        if slot not in self.buffers or not path.exists():
            self.buffers[slot] = _allocate(path, self.size)
        written = {}
        for name, param, blocks in found:
            mine = [block for block in blocks if _key(block) in self.offsets and _key(block) not in written]
            values_here = param.detach() if mine else None  # which may have to be computed
            for block in mine:
                key = _key(block)
                offset, source = self.offsets[key], block.view(values_here)
                count = source.numel() * self.dtype.itemsize
                values = self.buffers[slot][offset : offset + count].view(self.dtype)
                values.view(source.shape).copy_(source)
                if not all(map(torch.isfinite, values.aminmax())):  # NaN wins over every other value
                    raise WeightSyncError(f"parameter {name} holds NaN or infinity in its part of {block.name}")
                shared = SharedBlock(self.rank, str(path), offset, block.box, checksum(values))
                written[key] = (block.name, tuple(block.shape), shared)
        if absent := sorted(set(self.offsets) - set(written)):
            raise WeightSyncError(f"{absent[0][0]} was there at the first sync and is gone now")
        return list(written.values())


def verify(manifest: Manifest, reports: Sequence[dict[str, Any]]) -> None:
    """Prove that each server read all of `manifest` as it was written; WeightSyncError names the rank and the tensor otherwise.

    Per server, the slices its workers read must cover every tensor; where they tile a block, their checksums must add up to the block's.
    Overlapping slices that are not equal are held to coverage alone, unless one of them is the whole block.
    """
    for server in sorted({report["server"] for report in reports}):
        reads: dict[tuple[str, int], dict[Box, int]] = {}
        for report in reports:
            if report["server"] != server:
                continue
            who = f"{server}, worker {report['worker']}"
            if report["version"] != manifest.version:
                raise WeightSyncError(f"{who} reports weight version {report['version']}; {manifest.version} was sent")
            for name, index, part, total in report["reads"]:
                box = (tuple(part[0]), tuple(part[1]))
                if reads.setdefault((name, index), {}).setdefault(box, total) != total:
                    raise WeightSyncError(f"{who}: {name}{brackets(box)} changed while it was read")
        for name, tensor in manifest.tensors.items():
            parts = [part for index in range(len(tensor.blocks)) for part in reads.get((name, index), {})]
            if left := missing(whole(tensor.shape), parts):
                raise WeightSyncError(f"{server}: nobody read {name}{brackets(left[0])}")
            for index, block in enumerate(tensor.blocks):
                _verify_block(name, block.box, block, reads[name, index])


def _verify_block(name: str, box: Box, block: SharedBlock, parts: dict[Box, int]) -> None:
    if box in parts:
        total = parts[box]
    elif sum(map(size, parts)) == size(box):
        total = sum(parts.values()) % 2**64
    else:
        return
    if total != block.checksum:
        raise WeightSyncError(
            f"rank {block.rank}, {name}{brackets(box)}: checksum {total:016x} was read; {block.checksum:016x} was written"
        )


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


def _key(block: Block) -> tuple:
    return block.name, tuple(block.shape), block.box


def _by_layer(item: tuple[str, Any]) -> tuple[int, str]:
    """Tensors of one layer together: vLLM buffers every layer that has begun to load until it is complete."""
    numbers = [int(word) for word in item[0].split(".") if word.isdigit()]
    return (numbers[0] if numbers else -1), item[0]
