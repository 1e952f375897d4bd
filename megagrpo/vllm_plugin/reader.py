"""A worker's view of the trainer's weights: hands out exactly the slices that are copied, and keeps the books."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from megagrpo.families.boxes import Box, brackets, extent, size
from megagrpo.transfer.checksums import checksum, copy_checked
from megagrpo.transfer.ledger import Ledgers
from megagrpo.transfer.manifest import DTYPES, Manifest, WeightSyncError, in_addends
from megagrpo.transfer.slices import plan
from megagrpo.vllm_plugin.lazy_tensors import LazyTensor, box_of, restride


class BlockSource(Protocol):
    """Where a worker gets parts of the trainer's blocks; `bytes` were read or received so far."""

    bytes: int

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """The disjoint parts that make up `box` of tensor `name`: (index of the block, part). LookupError when nobody holds one."""

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """The elements of one of these parts, in its shape; any strides."""

    def check(self, name: str, index: int, part: Box, total: int) -> None:
        """WeightSyncError when the source knows the checksum of this part and it is not `total`."""

    def proof(self, reads: dict[tuple[str, int, Box], int]) -> dict[str, Any]:
        """What the trainer is told of the parts that were read, (tensor, index of the block, part) -> checksum, to verify them by."""

    def drain(self) -> None:
        """The loaders have seen every tensor: take in what is still on its way."""

    def release(self) -> None:
        """Nothing will be asked for any more."""


class Maps(Protocol):
    """Memory of the trainer's ranks that this process can read."""

    def bytes_of(self, name: str) -> Tensor:
        """All bytes of the memory that blocks call `name`; OSError when it cannot be mapped."""


class MappedBlocks:
    """Blocks in memory that this worker can map, each from when its rank has written it. `reader` is the worker's number: readers start
    with different holders. WeightSyncError for a block that is not there or does not fit."""

    def __init__(self, manifest: Manifest, reader: int, maps: Maps, ledgers: Ledgers):
        self.manifest, self.reader, self.ledgers = manifest, reader, ledgers
        self.dtype = DTYPES[manifest.dtype]
        self.held: dict[str, Tensor] = {}  # what blocks call their memory -> its bytes
        self.bytes = 0
        for name, tensor in manifest.tensors.items():
            for block in tensor.blocks:
                who, count = f"rank {block.rank}, {name}: {block.file}", size(block.box) * self.dtype.itemsize
                try:
                    if block.file not in self.held:
                        self.held[block.file] = maps.bytes_of(block.file)
                except OSError as error:
                    raise WeightSyncError(f"{who} cannot be read: {error.strerror}") from error
                if block.offset + count > self.held[block.file].numel():
                    raise WeightSyncError(f"{who} holds {self.held[block.file].numel()} bytes; {count} were expected at {block.offset}")

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Each element of `box` once; where several blocks hold it, readers with different numbers begin at different ones."""
        return plan(box, [block.box for block in self.manifest.tensors[name].blocks], self.reader)

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """A view of the mapped memory, once the block is written."""
        block = self.manifest.tensors[name].blocks[index]
        count = size(block.box) * self.dtype.itemsize
        self.ledgers.wait_for(block.rank, block.offset + count, name)
        held = self.held[block.file][block.offset : block.offset + count].view(self.dtype).view(extent(block.box))
        self.bytes += size(part) * self.dtype.itemsize
        return held[window(part, block.box)]

    def check(self, name: str, index: int, part: Box, total: int) -> None:
        """The trainer does: parts of a block add up to it."""

    def proof(self, reads: dict[tuple[str, int, Box], int]) -> dict[str, Any]:
        """All of them."""
        return {"reads": [[name, index, part, total] for (name, index, part), total in reads.items()]}

    def drain(self) -> None:
        """Everything lies there already."""

    def release(self) -> None:
        """Let go of the memory; files stay mapped for the next update."""
        self.held.clear()
        self.ledgers.close()


class Announced:
    """Blocks that are known of and not here: what a rehearsal reads, which is given zeros."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """As if they were here."""
        return plan(box, [block.box for block in self.manifest.tensors[name].blocks])


class ShardReader:
    """Source of lazy tensors for one weight update.

    `wanted` collects the boxes that loaders announced, `fetched` how often each was fetched, `reads` the slices of them with their
    checksums, `arrivals` how many elements each destination was given, `copies` what it was given last. With `blank` set, zeros are handed
    out instead, for a rehearsal. `note` hears of every fetch before it begins.
    """

    def __init__(self, manifest: Manifest, source: BlockSource, note: Callable[[str], None] = lambda place: None):
        self.manifest, self.source, self.note = manifest, source, note
        self.dtype = DTYPES[manifest.dtype]
        self.blank = False
        self.seconds = self.checksum_seconds = 0.0  # that copying took, and the checksums of it
        self.wanted: set[tuple[str, Box]] = set()
        self.fetched: Counter[tuple[str, Box]] = Counter()
        self.reads: dict[tuple[str, int, Box], int] = {}  # (tensor, block index, part) -> checksum
        self.arrivals: dict[int, dict[tuple, int]] = {}  # storage -> {place in it: elements}
        self.copies: dict[int, LazyTensor] = {}  # storage -> the last part of a tensor that was copied to it

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, lazy tensor) of every tensor in the manifest, in its order."""
        for name, tensor in self.manifest.tensors.items():
            shape, dtype = (tensor.shape[:-1], torch.float32) if self._in_addends(name) else (tensor.shape, self.dtype)
            yield name, LazyTensor.of(name, shape, dtype, self)

    def announce(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Note that a loader copies `view` to `destination`; WeightSyncError when nobody published part of it."""
        if not view.numel():
            return
        self.arrive(destination)
        self.copies[destination.untyped_storage()._cdata] = LazyTensor(view, name, self)
        box, _ = self.box_of(name, view)
        if (name, box) not in self.wanted:
            self._parts(name, box)
            self.wanted.add((name, box))

    def arrive(self, destination: Tensor) -> None:
        """Note that a loader fills `destination`."""
        place = (destination.storage_offset(), destination.size(), destination.stride())
        self.arrivals.setdefault(destination.untyped_storage()._cdata, {})[place] = destination.numel()

    def fetch(self, name: str, view: Tensor) -> Tensor:
        """The elements of `view`, straight from the source when one part holds them all."""
        if not view.numel():
            return torch.zeros(view.shape, dtype=view.dtype)
        self.note(f"the load of {name}")
        box, strides = self.box_of(name, view)
        self.fetched[name, box] += 1
        if self.blank:
            return torch.zeros(view.shape, dtype=view.dtype)
        values = self._values(name, box)
        return restride(values.float().sum(-1) if self._in_addends(name) else values.contiguous(), view, strides)

    def _values(self, name: str, box: Box) -> Tensor:
        parts, values = self._parts(name, box), None
        if len(parts) == 1:
            return self._read(name, *parts[0])
        for index, part in parts:
            read = self._read(name, index, part)
            if values is None:
                values = torch.empty(extent(box), dtype=self.dtype, device=read.device)
            values[window(part, box)] = read
        return values

    def _in_addends(self, name: str) -> bool:
        return in_addends(name, self.manifest.dtype)

    def box_of(self, name: str, view: Tensor) -> tuple[Box, list[int] | None]:
        """As `box_of`, of what travels."""
        shape = self.manifest.tensors[name].shape
        if not self._in_addends(name):
            return box_of(view, shape)
        (lo, hi), strides = box_of(view, shape[:-1])
        return ((*lo, 0), (*hi, shape[-1])), strides

    def fill(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Copy the elements of `view` to `destination`; checked on the way when both have the order of the tensor."""
        started = time.perf_counter()
        box, strides = self.box_of(name, view) if view.numel() else (None, None)
        plain = destination.is_contiguous() and destination.dtype == self.dtype and destination.device.type == "cpu"
        if plain and not self.blank and not self._in_addends(name) and _in_order(view, strides):
            self.note(f"the load of {name}")
            self.fetched[name, box] += 1
            target = destination.view(extent(box))
            for index, part in self._parts(name, box):
                self._copy(name, index, part, target[window(part, box)])
        else:
            destination.copy_(self.fetch(name, view))
        self.seconds += time.perf_counter() - started

    @property
    def bytes(self) -> int:
        """What was read or received so far."""
        return self.source.bytes

    def unread(self) -> list[str]:
        """Announced boxes whose elements were never fetched, as text."""
        return [f"{name}{brackets(box)}" for name, box in sorted(self.wanted - self.fetched.keys())]

    def _parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        try:
            return self.source.parts(name, box)
        except LookupError as error:
            shape = self.manifest.tensors[name].shape
            raise WeightSyncError(f"{name}: {error} of shape {shape}; the trainer published only part of this tensor") from error

    def _read(self, name: str, index: int, part: Box) -> Tensor:
        values = self.source.values(name, index, part)
        self._sum(name, index, part, values)
        return values

    def _sum(self, name: str, index: int, part: Box, values: Tensor) -> None:
        started = time.perf_counter()
        total = checksum(values, part[0][-1] if part[0] else 0)
        self.checksum_seconds += time.perf_counter() - started
        self._note(name, index, part, total)

    def _note(self, name: str, index: int, part: Box, total: int) -> None:
        self.source.check(name, index, part, total)
        self.reads[name, index, part] = total

    def _copy(self, name: str, index: int, part: Box, target: Tensor) -> None:
        values = self.source.values(name, index, part)
        if target.is_contiguous() and values.device.type == "cpu":
            total, seconds = copy_checked(target, values, part)
            self.checksum_seconds += seconds
            self._note(name, index, part, total)
        else:
            self._sum(name, index, part, values)
            target.copy_(values)


def window(part: Box, box: Box) -> tuple[slice, ...]:
    """What cuts `part` out of a tensor that holds `box`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(*part, box[0], strict=True))


def _in_order(view: Tensor, strides: list[int] | None) -> bool:
    """Whether a view, with these strides inside its box, has the elements of the box in the box's order."""
    contiguous = torch.empty(view.shape, device="meta").stride()
    return strides is not None and all(n == 1 or a == b for n, a, b in zip(view.shape, strides, contiguous, strict=True))
