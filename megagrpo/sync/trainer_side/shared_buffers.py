"""One rank's files in shared memory: which blocks it writes, where they lie, and the writing itself."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import Box, extent
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.sync.trainer_side.node_shares import BlockKey, Nodes, exchange, share_out
from megagrpo.sync.trainer_side.transport import Parameter, Ranks, SendReport, Weight, key_of
from megagrpo.sync.wire.copy_checksums import checksum, copy_checked, finite_as, first_false, is_host, on_host
from megagrpo.sync.wire.progress_file import NUM_SLOTS, WORD_BYTES, ActivityFile, ProgressFile, progress_path
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.sync_plan import layer_of
from megagrpo.weights.slices.tensor_index import ALIGNMENT, ENGINE_DTYPES

BlockInFile = tuple[BlockKey, int]  # a block, and its offset in bytes
BlockToWrite = tuple[str, Parameter, Block]  # parameter name, parameter, and one block of it


class Slots:
    """This rank's files in shared memory, and the blocks that this rank publishes. Construction is collective.

    Blocks lie in the files in the order in which they are written: parameter by parameter, as the engine asks for them.
    Blocks that this rank receives from another node follow.
    """

    def __init__(self, weights: Sequence[Weight], ranks: Ranks, dtype: str, folder: Path, nodes: Nodes):
        self.rank, self.dtype, self.folder = ranks.world_rank, ENGINE_DTYPES[dtype], folder
        held = {key_of(block): math.prod(block.block_shape) for _, _, blocks in weights for block in blocks}
        sizes = ranks.all_gather_objects(list(held.items()))
        elements = {key: count for of_rank in sizes for key, count in of_rank}
        self.shares = share_out(sizes, nodes.of_ranks)
        self.transfers = self.shares.of(self.rank)
        written = []  # per parameter, the keys of the blocks that this rank writes
        for _, _, blocks in weights:
            keys = sorted(map(key_of, blocks), key=_position)
            written.append([key for key in keys if self.rank in self.shares.writer[key]])
        in_order = sorted(filter(None, written), key=lambda keys: _position(keys[0]))
        received = [one.key for one in self.transfers if one.receiver == self.rank]
        self.blocks: list[BlockInFile] = []
        self.numbers: dict[BlockKey, int] = {}  # key of a block -> its index in `blocks`
        self.size = 0
        for key in [*(key for keys in in_order for key in keys), *received]:
            if key not in self.numbers:
                self.numbers[key] = len(self.blocks)
                self.blocks.append((key, self.size))
                self.size += -(-elements[key] * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.to_write: list[BlockToWrite] = []  # in the order of the file
        self.buffers: dict[str, Tensor] = {}  # name of a slot's memory in blocks -> its bytes [size] uint8
        self.progress: dict[Path, ProgressFile] = {}
        self.activity: ActivityFile | None = None

    def close(self) -> None:
        """Close the progress files."""
        while self.progress:
            self.progress.popitem()[1].close()

    def check(self, weights: Sequence[Weight]) -> None:
        """Check `weights`, and set `to_write`.

        Raises WeightSyncError when a value is NaN or infinity in the engine's dtype, or when a block is missing.
        """
        to_write: dict[int, BlockToWrite] = {}
        finite: list[tuple[str, str, Tensor]] = []  # read at once, because each would make the host wait for a GPU
        for name, param, blocks in weights:
            self._note(f"parameter {name}")
            numbered = {self.numbers[key]: block for block in blocks if (key := key_of(block)) in self.numbers}
            fresh = {number: block for number, block in numbered.items() if number not in to_write}
            if not fresh:
                continue
            values = param.detach()  # may be computed on each call, as for merged adapters
            for number, block in fresh.items():
                finite.append((name, block.name, finite_as(block.view(values), self.dtype)))
                to_write[number] = name, param, block
        if (bad := first_false([flag for *_, flag in finite])) is not None:
            name, tensor, _ = finite[bad]
            raise WeightSyncError(f"parameter {name} holds NaN or infinity in its part of {tensor}")
        received = {self.numbers[one.key] for one in self.transfers if one.receiver == self.rank}
        if absent := self.numbers.values() - to_write.keys() - received:
            (name, *_), _ = self.blocks[min(absent)]
            raise WeightSyncError(f"{name} was present in the first sync and is missing now")
        self.to_write = [to_write[number] for number in sorted(to_write)]

    def open(self, weight_version: int) -> None:
        """Reserve memory for a version, and reset its progress file."""
        if not self.blocks:
            return
        path = progress_path(self.folder, self.rank, weight_version)
        if path not in self.progress or not path.exists():
            self.progress[path] = ProgressFile(path, allocate(path, WORD_BYTES).numpy().view(np.uint64))
        self.progress[path].begin(weight_version)
        self.buffer(weight_version % NUM_SLOTS)

    def memory_of(self, rank: int, slot: int, folder: Path) -> str:
        """Return the name in blocks, `SharedBlock.file`, of the memory of `rank`, whose node has this folder."""
        return str(folder / f"rank{rank}.slot{slot}")

    def buffer(self, slot: int) -> tuple[str, Tensor]:
        """Return the path of this slot's file, and its bytes [size] uint8."""
        path = Path(self.memory_of(self.rank, slot, self.folder))
        if str(path) not in self.buffers or not path.exists():
            self.buffers[str(path)] = allocate(path, self.size)
        return str(path), self.buffers[str(path)]

    def write(self, weight_version: int, task: Task = SILENT_TASK) -> SendReport:
        """Cast and copy every block; workers may read a block once it is written. An error withdraws the version."""
        if not self.blocks:
            return SendReport(0)
        progress = self.progress[progress_path(self.folder, self.rank, weight_version)]
        buffer = self.buffer(weight_version % NUM_SLOTS)[1]
        source, num_bytes, checksum_seconds, checksums = None, 0, 0.0, [0] * len(self.blocks)
        task.expect(self.size, "B")
        written: list[tuple[int, int, Tensor]] = []  # block, end of its bytes, checksum; not yet recorded

        def record() -> None:
            totals = on_host([total for *_, total in written])
            for (number, end, _), total in zip(written, totals, strict=True):
                checksums[number] = total
                progress.record(weight_version, end)
            written.clear()

        try:
            for number, (name, param, block) in enumerate(self.to_write):
                if written and layer_of(block.name) != layer_of(self.to_write[written[-1][0]][2].name):
                    record()  # one transfer per layer; it also waits for the copies
                if param is not source:
                    self._note(f"parameter {name}")
                    source, values = param, param.detach()
                view, offset = block.view(values), self.blocks[number][1]
                end = offset + view.numel() * self.dtype.itemsize
                total, seconds = copy_checked(buffer[offset:end].view(self.dtype), view, block.box)
                written.append((number, end, total))
                if is_host(buffer):
                    record()
                num_bytes += end - offset
                task.advance(end - offset)
                checksum_seconds += seconds
            record()
            checksum_seconds += self._exchange(buffer, progress, weight_version, checksums)
        except BaseException:
            progress.withdraw()
            raise
        return SendReport(num_bytes, checksum_seconds, tuple(checksums))

    def _exchange(self, buffer: Tensor, progress: ProgressFile, weight_version: int, checksums: list[int]) -> float:
        """Send written blocks to other nodes and receive theirs, with `checksums`. Return the seconds of checksums."""
        spent = 0.0

        def span(key: BlockKey) -> Tensor:
            start = self.blocks[self.numbers[key]][1]
            return buffer[start : start + math.prod(extent(key[2])) * self.dtype.itemsize]

        def received(key: BlockKey) -> None:
            nonlocal spent
            values, number = span(key), self.numbers[key]
            started = time.perf_counter()
            elements = values.view(self.dtype).view(extent(key[2]) or (1,))
            checksums[number] = checksum(elements, key[2])
            spent += time.perf_counter() - started
            progress.record(weight_version, self.blocks[number][1] + values.numel())

        if self.transfers:
            self._note("the exchange of blocks between nodes")
        exchange(self.transfers, self.rank, span, received)
        return spent

    def _note(self, activity: str) -> None:
        """Write what this rank does to its activity file, which the other ranks read when this rank is late."""
        if self.activity is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.activity = ActivityFile(activity_path(self.folder, self.rank))
        self.activity.write(activity)


def allocate(path: Path, count: int) -> Tensor:
    """Create and map a file of `count` bytes in shared memory, [count] uint8.

    Space is reserved now: a write to full shared memory would kill the process. Raises WeightSyncError when it is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, count)
    except OSError as error:
        remove(path)
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path.parent).free
        raise WeightSyncError(
            f"{path.parent.parent} is full: a slot of this rank's weights takes {count / 2**20:.0f} MiB, "
            f"{free / 2**20:.0f} MiB are free; enlarge it (docker run --shm-size, mount -o remount,size=) or free some"
        ) from error
    finally:
        os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=count, dtype=torch.uint8)


def _position(key: BlockKey) -> tuple[int, str, Box]:
    """Sort key of a block: its tensor, then its position in the tensor."""
    tensor, _, box = key
    return *by_layer(tensor), box


def by_layer(tensor: str) -> tuple[int, str]:
    """Sort key that keeps a layer's tensors together: vLLM buffers every layer that is loading until it is complete."""
    return layer_of(tensor), tensor


def activity_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's activity file."""
    return folder / f"rank{rank}.activity"
