"""A worker's view of the weights in shared memory: hands out exactly the slices that are copied, and keeps the books."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from megagrpo.boxes import Box, brackets, extent, size
from megagrpo.bridge.reshard import plan
from megagrpo.rollout.lazy import LazyTensor, box_of, restride
from megagrpo.rollout.shared_weights import DTYPES, Manifest, SharedBlock, WeightSyncError, checksum


class ShardReader:
    """Source of lazy tensors for one weight update.

    `wanted` collects the boxes that loaders announced, `reads` the slices that were fetched with their checksums, `arrivals` how many
    elements each destination was given. With `blank` set, zeros are handed out instead: what ends an update that cannot be completed.
    """

    def __init__(self, manifest: Manifest, reader: int, maps: dict[str, Tensor]):
        self.manifest, self.reader, self.maps = manifest, reader, maps
        self.dtype = DTYPES[manifest.dtype]
        self.blank = False
        self.bytes = 0
        self.wanted: set[tuple[str, Box]] = set()
        self.fetched: set[tuple[str, Box]] = set()
        self.reads: dict[tuple[str, int, Box], int] = {}  # (tensor, block index, part) -> checksum
        self.arrivals: dict[int, dict[tuple, int]] = {}  # storage -> {place in it: elements}
        for name, tensor in manifest.tensors.items():
            for block in tensor.blocks:
                self._check_file(name, block, size(block.box) * self.dtype.itemsize)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, lazy tensor) of every tensor in the manifest, in its order."""
        for name, tensor in self.manifest.tensors.items():
            yield name, LazyTensor.of(name, tensor.shape, self.dtype, self)

    def announce(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Note that a loader copies `view` to `destination`; WeightSyncError when nobody published part of it."""
        if not view.numel():
            return
        place = (destination.storage_offset(), destination.size(), destination.stride())
        self.arrivals.setdefault(destination.untyped_storage()._cdata, {})[place] = destination.numel()
        box, _ = box_of(view, self.manifest.tensors[name].shape)
        if (name, box) not in self.wanted:
            self._plan(name, box)
            self.wanted.add((name, box))

    def fetch(self, name: str, view: Tensor) -> Tensor:
        """The elements of `view`, straight from shared memory when one block holds them all."""
        if self.blank or not view.numel():
            return torch.zeros(view.shape, dtype=self.dtype)
        box, strides = box_of(view, self.manifest.tensors[name].shape)
        self.fetched.add((name, box))
        parts = self._plan(name, box)
        if len(parts) == 1:
            return restride(self._read(name, *parts[0]).contiguous(), view, strides)
        values = torch.empty(extent(box), dtype=self.dtype)
        for index, part in parts:
            target = tuple(slice(a - o, b - o) for a, b, o in zip(*part, box[0], strict=True))
            values[target] = self._read(name, index, part)
        return restride(values, view, strides)

    def unread(self) -> list[str]:
        """Announced boxes whose elements were never fetched, as text."""
        return [f"{name}{brackets(box)}" for name, box in sorted(self.wanted - self.fetched)]

    def _plan(self, name: str, box: Box) -> list[tuple[int, Box]]:
        tensor = self.manifest.tensors[name]
        try:
            return plan(box, [block.box for block in tensor.blocks], self.reader)
        except LookupError as error:
            raise WeightSyncError(f"{name}: {error} of shape {tensor.shape}; the trainer published only part of this tensor") from error

    def _read(self, name: str, index: int, part: Box) -> Tensor:
        tensor = self.manifest.tensors[name]
        block = tensor.blocks[index]
        own = block.box
        count = math.prod(extent(own)) * self.dtype.itemsize
        held = self.maps[block.file][block.offset : block.offset + count].view(self.dtype).view(extent(own))
        values = held[tuple(slice(a - o, b - o) for a, b, o in zip(*part, own[0], strict=True))]
        self.reads[name, index, part] = checksum(values)
        self.bytes += values.numel() * self.dtype.itemsize
        return values

    def _check_file(self, name: str, block: SharedBlock, count: int) -> None:
        who = f"rank {block.rank}, {name}: {block.file}"
        try:
            held = os.stat(block.file)
        except OSError as error:
            raise WeightSyncError(f"{who} cannot be read: {error.strerror}") from error
        if block.offset + count > held.st_size:
            raise WeightSyncError(f"{who} holds {held.st_size} bytes; {count} were expected at {block.offset}")
        mapped = self.maps.get(block.file)
        if mapped is None or mapped.numel() != held.st_size or mapped.inode != held.st_ino:
            mapped = torch.from_file(block.file, shared=False, size=held.st_size, dtype=torch.uint8)
            mapped.inode = held.st_ino
            self.maps[block.file] = mapped
