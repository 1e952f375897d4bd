"""The worker's end of shared_memory and cuda_ipc: reads blocks in mapped memory, each as soon as its rank wrote it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.shared.boxes import Box, extent, size
from megagrpo.platform.process.atomic_file import write_atomically
from megagrpo.sync.vllm_side.reader import window
from megagrpo.sync.vllm_side.receiver import BlockSource, Receiver, Worker
from megagrpo.sync.wire.cuda_handles import DeviceMaps
from megagrpo.sync.wire.progress_file import ActivityFile, ProgressReader
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import ENGINE_DTYPES, TensorIndex


class MemoryReceiver(Receiver):
    """Maps the trainer's files, or with `handles` in the request the memory of its GPUs. Reports and activity go to
    files in the folder `replies` of the request."""

    def __init__(self, worker: Worker):
        super().__init__(worker)
        self.files = SharedFiles()
        self.replies: Path | None = None  # unknown before the first update
        self.activity: ActivityFile | None = None

    def open(self, request: dict[str, Any], version: int) -> MappedBlocks:
        """Map all memory of the update. The request is made by `FileUpdate.request`."""
        self.replies, self.activity = Path(request["replies"]), None
        self.note("update")
        index = TensorIndex.load(request["index"], version)
        maps: SharedFiles | DeviceMaps = self.files
        if "handles" in request:
            of_worker = {name: handles[self.worker.index] for name, handles in request["handles"].items()}
            maps = DeviceMaps(of_worker, self.worker.device)
        progress = ProgressReader(Path(request["index"]).parent, version, request["seconds"], self.note)
        return MappedBlocks(index, self.worker.index, maps, progress)

    def report(self, report: dict[str, Any]) -> None:
        """Write the report to a file, in one step."""
        if self.replies is not None:
            write_atomically(self.replies / f"worker{self.worker.index}.json", json.dumps(report))

    def note(self, activity: str) -> None:
        """Write the activity to this worker's file."""
        if self.replies is None:
            return
        path = self.replies / f"worker{self.worker.index}.activity"
        with contextlib.suppress(OSError):  # the trainer is gone, and its folder too
            if self.activity is None or not path.exists():  # the trainer empties the folder before each update
                self.activity = ActivityFile(path)
            self.activity.write(activity)

    def close(self) -> None:
        """Unmap the trainer's files."""
        self.files.clear()


class SharedFiles:
    """A cache of mapped block files. A file that was recreated is mapped again."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[int, Tensor]] = {}  # path -> (inode, its bytes)

    def bytes_of(self, path: str) -> Tensor:
        """Return all bytes of the file `path`, [n] uint8. Raises OSError when the file does not exist."""
        status = os.stat(path)
        inode, mapped = self._maps.get(path, (None, None))
        if mapped is None or inode != status.st_ino or mapped.numel() != status.st_size:
            mapped = torch.from_file(path, shared=False, size=status.st_size, dtype=torch.uint8)
            self._maps[path] = status.st_ino, mapped
        return mapped

    def clear(self) -> None:
        """Unmap all files."""
        self._maps.clear()


class MappedBlocks(BlockSource):
    """Blocks in memory that this worker maps; each block is readable once its rank has written it.

    `maps` is the memory of the trainer's ranks. Raises WeightSyncError for a block that is missing or exceeds it.
    """

    def __init__(self, index: TensorIndex, reader: int, maps: SharedFiles | DeviceMaps, progress: ProgressReader):
        super().__init__(index, reader)
        self.progress, self.dtype = progress, ENGINE_DTYPES[index.dtype]
        self.memory: dict[str, Tensor] = {}  # name of the memory in blocks -> its bytes
        for name, tensor in index.tensors.items():
            for block in tensor.blocks:
                who, count = f"rank {block.rank}, {name}: {block.file}", size(block.box) * self.dtype.itemsize
                try:
                    if block.file not in self.memory:
                        self.memory[block.file] = maps.bytes_of(block.file)
                except OSError as error:
                    raise WeightSyncError(f"{who} cannot be read: {error.strerror}") from error
                if block.offset + count > self.memory[block.file].numel():
                    raise WeightSyncError(
                        f"{who} holds {self.memory[block.file].numel()} bytes; {count} were expected at {block.offset}"
                    )

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return a view of the mapped memory with the shape of `part`, after the block is written. Raises
        WeightSyncError when the rank is late or has died."""
        block = self.index.tensors[name].blocks[index]
        count = size(block.box) * self.dtype.itemsize
        self.progress.wait_for(block.rank, block.offset + count, name)
        values = self.memory[block.file][block.offset : block.offset + count].view(self.dtype).view(extent(block.box))
        self.bytes += size(part) * self.dtype.itemsize
        return values[window(part, block.box)]

    def release(self) -> None:
        """Release the memory; files stay mapped for the next update."""
        self.memory.clear()
        self.progress.close()
