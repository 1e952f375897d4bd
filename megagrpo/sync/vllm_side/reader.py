"""A worker's view of the trainer's weights: reads exactly the slices that loaders copy, and records what was announced,
fetched and read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megagrpo.models.families.boxes import Box, brackets, extent, size
from megagrpo.sync.vllm_side.lazy_tensors import LazyTensor, box_of, restride
from megagrpo.sync.wire.box_slices import cover
from megagrpo.sync.wire.copy_checksums import checksum, copy_checked, device_checksum, is_host, on_host
from megagrpo.sync.wire.ledger import Ledgers
from megagrpo.sync.wire.manifest import DTYPES, Manifest, WeightSyncError, in_addends
from megagrpo.sync.wire.sync_plan import layer_of


class BlockSource(Protocol):
    """The provider of parts of the trainer's blocks: `MappedBlocks`, `ReceivedBlocks`, or `BlankBlocks` in a dry run.

    `bytes` is the number of bytes read or received so far.
    """

    bytes: int

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Return the disjoint parts that make up `box` of tensor `name`: (index of the block, part). Raises LookupError
        for a part that no rank holds."""

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return the elements of one of these parts, in its shape and the manifest's dtype, with any strides."""

    def check(self, name: str, index: int, part: Box, total: int) -> None:
        """Raises WeightSyncError when the source knows the checksum of this part and `total` differs."""

    def proof(self, reads: Mapping[tuple[str, int, Box], int]) -> dict[str, Any]:
        """Return the fields of the report by which the trainer verifies the reads: (tensor, index of the block, part)
        -> checksum."""

    def drain(self) -> None:
        """Receive everything that is still in flight, after the loaders have seen every tensor."""

    def release(self) -> None:
        """Release all memory: no more elements will be requested."""


class Maps(Protocol):
    """Memory of the trainer's ranks that this process can read."""

    def bytes_of(self, name: str) -> Tensor:
        """Return all bytes of the memory that blocks call `name`, [n] uint8. Raises OSError or WeightSyncError when it
        cannot be mapped."""


class MappedBlocks:
    """Blocks in memory that this worker maps; each block is readable once its rank has written it.

    `reader` is the worker's index: if several blocks hold an element, workers read it from different ones. Raises
    WeightSyncError for a block that is missing or exceeds its memory.
    """

    def __init__(self, manifest: Manifest, reader: int, maps: Maps, ledgers: Ledgers):
        self.manifest, self.reader, self.ledgers = manifest, reader, ledgers
        self.dtype = DTYPES[manifest.dtype]
        self.memory: dict[str, Tensor] = {}  # name of the memory in blocks -> its bytes
        self.bytes = 0
        for name, tensor in manifest.tensors.items():
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

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Return parts that cover each element of `box` once. Where several blocks hold an element, readers with
        different indices use different ones."""
        return cover(box, [block.box for block in self.manifest.tensors[name].blocks], self.reader)

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return a view of the mapped memory with the shape of `part`, after the block is written. Raises
        WeightSyncError when the rank is late or has died."""
        block = self.manifest.tensors[name].blocks[index]
        count = size(block.box) * self.dtype.itemsize
        self.ledgers.wait_for(block.rank, block.offset + count, name)
        values = self.memory[block.file][block.offset : block.offset + count].view(self.dtype).view(extent(block.box))
        self.bytes += size(part) * self.dtype.itemsize
        return values[window(part, block.box)]

    def check(self, name: str, index: int, part: Box, total: int) -> None:
        """Does nothing: the trainer compares the checksums of all parts with the checksum of their block."""

    def proof(self, reads: Mapping[tuple[str, int, Box], int]) -> dict[str, Any]:
        """Return all reads with their checksums."""
        return {"reads": [[name, index, part, total] for (name, index, part), total in reads.items()]}

    def drain(self) -> None:
        """Does nothing: every block is already in memory."""

    def release(self) -> None:
        """Release the memory; files stay mapped for the next update."""
        self.memory.clear()
        self.ledgers.close()


class BlankBlocks:
    """Blocks without data, for a dry run: loaders read zeros, and no checksum is computed."""

    def __init__(self, manifest: Manifest):
        self.manifest, self.bytes = manifest, 0

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Return the parts that make up `box`, as a source with data does."""
        return cover(box, [block.box for block in self.manifest.tensors[name].blocks])

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return zeros, in the shape of the part and the manifest's dtype."""
        return torch.zeros(extent(part), dtype=DTYPES[self.manifest.dtype])

    def check(self, name: str, index: int, part: Box, total: int) -> None:
        """Does nothing: no rank sent a checksum."""

    def proof(self, reads: Mapping[tuple[str, int, Box], int]) -> dict[str, Any]:
        """Return nothing: a dry run makes no report."""
        return {}

    def drain(self) -> None:
        """Does nothing: nothing is in flight."""

    def release(self) -> None:
        """Does nothing: there is no memory."""


class ShardReader:
    """The source of lazy tensors for one weight update. It records what the loaders do, for checks that every parameter
    was filled.

    - `wanted`: the boxes that loaders announced; `fetched`: how often each box was fetched.
    - `reads`: the slices that were read, with their checksums. Checksums on a GPU are transferred and checked one layer
      at a time.
    - `arrivals`: how many elements each destination is to receive; `copies`: the last lazy tensor copied to each
      destination.
    - `blank`: return zeros, because `source` has no data. `note` receives a description of each fetch before it starts.
    """

    def __init__(self, manifest: Manifest, source: BlockSource, note: Callable[[str], None] = lambda activity: None):
        self.manifest, self.source, self.note = manifest, source, note
        self.dtype = DTYPES[manifest.dtype]
        self.blank = isinstance(source, BlankBlocks)
        self.seconds = self.checksum_seconds = 0.0  # spent on copies, and on their checksums
        self.wanted: set[tuple[str, Box]] = set()
        self.fetched: Counter[tuple[str, Box]] = Counter()
        self._reads: dict[tuple[str, int, Box], int] = {}  # (tensor, block index, part) -> checksum
        # reads of one layer whose checksums are on the device
        self._unchecked: list[tuple[str, int, Box, int | Tensor]] = []
        self.arrivals: dict[int, dict[tuple[Any, ...], int]] = {}  # storage -> (offset, size, stride) -> elements
        self.copies: dict[int, LazyTensor] = {}  # storage -> the last lazy tensor that was copied to it

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, lazy tensor) for every tensor of the manifest, in its order, with the Hugging Face shape. The
        dtype is the manifest's, or float32 for a tensor that travels as addends."""
        for name, tensor in self.manifest.tensors.items():
            shape, dtype = (tensor.shape[:-1], torch.float32) if self._in_addends(name) else (tensor.shape, self.dtype)
            yield name, LazyTensor.of(name, shape, dtype, self)

    def announce(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Record that a loader copies `view` [...] to `destination` [...]. Raises WeightSyncError when no rank has a
        part of `view`."""
        if not view.numel():
            return
        self.arrive(destination)
        self.copies[destination.untyped_storage()._cdata] = LazyTensor(view, name, self)
        box, _ = self.box_of(name, view)
        if (name, box) not in self.wanted:
            self._parts(name, box)
            self.wanted.add((name, box))

    def arrive(self, destination: Tensor) -> None:
        """Record that a loader fills `destination` [...]."""
        region = (destination.storage_offset(), destination.size(), destination.stride())
        self.arrivals.setdefault(destination.untyped_storage()._cdata, {})[region] = destination.numel()

    def fetch(self, name: str, view: Tensor) -> Tensor:
        """Return the elements of `view` [...], in its shape and dtype; without a copy when one part holds them all."""
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
        """Return the elements of a box, in its shape and the manifest's dtype."""
        parts = self._parts(name, box)
        values: Tensor | None = None
        if len(parts) == 1:
            return self._read(name, *parts[0])
        for index, part in parts:
            read = self._read(name, index, part)
            if values is None:
                values = torch.empty(extent(box), dtype=self.dtype, device=read.device)
            values[window(part, box)] = read
        assert values is not None, "a box that is not empty has a part"
        return values

    def _in_addends(self, name: str) -> bool:
        return in_addends(name, self.manifest.dtype)

    def box_of(self, name: str, view: Tensor) -> tuple[Box, list[int] | None]:
        """Like `lazy_tensors.box_of`, for the tensor in transit: with the extra dimension of addends, if any."""
        shape = self.manifest.tensors[name].shape
        if not self._in_addends(name):
            return box_of(view, shape)
        (lo, hi), strides = box_of(view, shape[:-1])
        return ((*lo, 0), (*hi, shape[-1])), strides

    def fill(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Copy the elements of `view` [...] to `destination` [...]. The checksum is computed during the copy when both
        are in the tensor's order."""
        started = time.perf_counter()
        if not (view.numel() and self._fill_in_order(name, view, destination)):
            destination.copy_(self.fetch(name, view))
        self.seconds += time.perf_counter() - started

    def _fill_in_order(self, name: str, view: Tensor, destination: Tensor) -> bool:
        """Copy part by part, if `destination` has the elements of the box of `view` in their order and dtype; return
        whether it does."""
        plain = destination.is_contiguous() and destination.dtype == self.dtype and destination.device.type == "cpu"
        if not plain or self.blank or self._in_addends(name):
            return False
        box, strides = self.box_of(name, view)
        if not _in_order(view, strides):
            return False
        self.note(f"the load of {name}")
        self.fetched[name, box] += 1
        target = destination.view(extent(box))
        for index, part in self._parts(name, box):
            self._copy(name, index, part, target[window(part, box)])
        return True

    @property
    def bytes(self) -> int:
        """Bytes read or received so far."""
        return self.source.bytes

    def unread(self) -> list[str]:
        """Return the announced boxes that were never fetched, as text."""
        return [f"{name}{brackets(box)}" for name, box in sorted(self.wanted - self.fetched.keys())]

    def _parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        try:
            return self.source.parts(name, box)
        except LookupError as error:
            shape = self.manifest.tensors[name].shape
            raise WeightSyncError(
                f"{name}: {error} of shape {shape}; the trainer published only part of this tensor"
            ) from error

    def _read(self, name: str, index: int, part: Box) -> Tensor:
        values = self.source.values(name, index, part)
        self._checksum_read(name, index, part, values)
        return values

    def _checksum_read(self, name: str, index: int, part: Box, values: Tensor) -> None:
        started, column = time.perf_counter(), part[0][-1] if part[0] else 0
        total = checksum(values, column) if is_host(values) else device_checksum(values, column)
        self.checksum_seconds += time.perf_counter() - started
        self._check_and_record(name, index, part, total)

    def _check_and_record(self, name: str, index: int, part: Box, total: int | Tensor) -> None:
        if self._unchecked and layer_of(self._unchecked[-1][0]) != layer_of(name):
            self.check_reads()
        self._unchecked.append((name, index, part, total))
        if isinstance(total, int):
            self.check_reads()

    def check_reads(self) -> None:
        """Check and record the reads whose checksums are still on the device. Raises WeightSyncError when one is
        wrong."""
        unchecked, self._unchecked = self._unchecked, []
        for (name, index, part, _), total in zip(unchecked, on_host([total for *_, total in unchecked]), strict=True):
            self.source.check(name, index, part, total)
            self._reads[name, index, part] = total

    @property
    def reads(self) -> dict[tuple[str, int, Box], int]:
        """(tensor, block index, part) -> checksum of every read so far."""
        self.check_reads()
        return self._reads

    def _copy(self, name: str, index: int, part: Box, target: Tensor) -> None:
        values = self.source.values(name, index, part)
        if target.is_contiguous() and values.device.type == "cpu":
            total, seconds = copy_checked(target, values, part)
            self.checksum_seconds += seconds
            self._check_and_record(name, index, part, total)
        else:
            self._checksum_read(name, index, part, values)
            target.copy_(values)


def window(part: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices that cut `part` out of a tensor that holds `box`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(*part, box[0], strict=True))


def _in_order(view: Tensor, strides: list[int] | None) -> bool:
    """Whether a view, with these strides inside its box, has the elements of the box in the box's order."""
    contiguous = torch.empty(view.shape, device="meta").stride()
    return strides is not None and all(
        n == 1 or a == b for n, a, b in zip(view.shape, strides, contiguous, strict=True)
    )
