"""A worker's view of trainer weights: reads what loaders copy, and records what is announced, fetched and read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.shared.boxes import Box, brackets, extent
from megagrpo.sync.vllm_side.lazy_tensors import LazyTensor, box_of, restride
from megagrpo.sync.vllm_side.receiver import BlankBlocks, BlockSource
from megagrpo.sync.wire.copy_checksums import device_checksum, is_host, on_host
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.sync_plan import layer_of
from megagrpo.weights.slices.tensor_index import ENGINE_DTYPES, in_addends


class ShardReader:
    """The source of lazy tensors for one weight update. It records loads, to check that every parameter was filled.

    - `announced`: the boxes that loaders announced; `fetched`: how often each box was fetched.
    - `reads`: the slices that were read, with their checksums. Checksums on a GPU are transferred and checked one layer
      at a time.
    - `arrivals`: how many elements each destination is to receive; `copies`: the last lazy tensor copied to each
      destination.
    - `blank`: return zeros, because `source` has no data. `note` receives a description of each fetch before it starts.
    """

    def __init__(self, source: BlockSource, note: Callable[[str], None] = lambda activity: None):
        self.index, self.source, self.note = source.index, source, note
        self.dtype = ENGINE_DTYPES[source.index.dtype]
        self.blank = isinstance(source, BlankBlocks)
        self.seconds = self.checksum_seconds = 0.0  # spent on copies, and on their checksums
        self.announced: set[tuple[str, Box]] = set()
        self.fetched: Counter[tuple[str, Box]] = Counter()
        self._reads: dict[tuple[str, int, Box], int] = {}  # (tensor, block index, part) -> checksum
        # reads of one layer whose checksums are on the device
        self._unchecked: list[tuple[str, int, Box, Tensor]] = []
        self.arrivals: dict[int, dict[tuple[Any, ...], int]] = {}  # storage -> (offset, size, stride) -> elements
        self.copies: dict[int, LazyTensor] = {}  # storage -> the last lazy tensor that was copied to it

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, lazy tensor) for every tensor of the index, in its order, with the Hugging Face shape. The
        dtype is the index's, or float32 for a tensor that travels as addends."""
        for name, tensor in self.index.tensors.items():
            shape, dtype = (tensor.shape[:-1], torch.float32) if self._in_addends(name) else (tensor.shape, self.dtype)
            yield name, LazyTensor.of(name, shape, dtype, self)

    def announce(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Record a copy of `view` [...] to `destination` [...]. Raises WeightSyncError if no rank has any of `view`."""
        if not view.numel():
            return
        self.arrive(destination)
        self.copies[destination.untyped_storage()._cdata] = LazyTensor(view, name, self)
        box, _ = self.box_of(name, view)
        if (name, box) not in self.announced:
            self._parts(name, box)
            self.announced.add((name, box))

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
        """Return the elements of a box, in its shape and the index's dtype."""
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
        return in_addends(name, self.index.dtype)

    def box_of(self, name: str, view: Tensor) -> tuple[Box, list[int] | None]:
        """Like `lazy_tensors.box_of`, for the tensor in transit: with the extra dimension of addends, if any."""
        shape = self.index.tensors[name].shape
        if not self._in_addends(name):
            return box_of(view, shape)
        (lo, hi), strides = box_of(view, shape[:-1])
        return ((*lo, 0), (*hi, shape[-1])), strides

    def fill(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Copy `view` [...] to `destination` [...], without memory in between when both are in the tensor's order."""
        started = time.perf_counter()
        if not (view.numel() and self._fill_in_order(name, view, destination)):
            destination.copy_(self.fetch(name, view))
        self.seconds += time.perf_counter() - started

    def _fill_in_order(self, name: str, view: Tensor, destination: Tensor) -> bool:
        """Copy by parts and return True, if `destination` has the elements of the box of `view` in their order."""
        if self.blank or self._in_addends(name) or not destination.is_contiguous():
            return False
        box, strides = self.box_of(name, view)
        if not _in_order(view, strides):
            return False
        self.note(f"the load of {name}")
        self.fetched[name, box] += 1
        target = destination.view(extent(box))
        for index, part in self._parts(name, box):
            target[window(part, box)] = self._read(name, index, part)
        return True

    @property
    def bytes(self) -> int:
        """Bytes read or received so far."""
        return self.source.bytes

    def unread(self) -> list[str]:
        """Return the announced boxes that were never fetched, as text."""
        return [f"{name}{brackets(box)}" for name, box in sorted(self.announced - self.fetched.keys())]

    def _parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        try:
            return self.source.parts(name, box)
        except LookupError as error:
            shape = self.index.tensors[name].shape
            raise WeightSyncError(
                f"{name}: {error} of shape {shape}; the trainer published only part of this tensor"
            ) from error

    def _read(self, name: str, index: int, part: Box) -> Tensor:
        values = self.source.values(name, index, part)
        started = time.perf_counter()
        total = device_checksum(values, part)
        self.checksum_seconds += time.perf_counter() - started
        if self._unchecked and layer_of(self._unchecked[-1][0]) != layer_of(name):
            self.check_reads()
        self._unchecked.append((name, index, part, total))
        if is_host(values):
            self.check_reads()
        return values

    def check_reads(self) -> None:
        """Check and record the reads with checksums still on the device. Raises WeightSyncError when one is wrong."""
        unchecked, self._unchecked = self._unchecked, []
        for (name, index, part, _), total in zip(unchecked, on_host([total for *_, total in unchecked]), strict=True):
            self.source.check(name, index, part, total)
            self._reads[name, index, part] = total

    @property
    def reads(self) -> dict[tuple[str, int, Box], int]:
        """(tensor, block index, part) -> checksum of every read so far."""
        self.check_reads()
        return self._reads


def window(part: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices that cut `part` out of a tensor that holds `box`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(*part, box[0], strict=True))


def _in_order(view: Tensor, strides: list[int] | None) -> bool:
    """Whether a view, with these strides inside its box, has the elements of the box in the box's order."""
    contiguous = torch.empty(view.shape, device="meta").stride()
    return strides is not None and all(
        n == 1 or a == b for n, a, b in zip(view.shape, strides, contiguous, strict=True)
    )
