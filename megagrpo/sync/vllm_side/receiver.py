"""The interface of a weight transport in vLLM's workers: a `Receiver` opens a `BlockSource` per update for the loaders.

The other end is a `Transport` (`sync/trainer_side/transport.py`), which names the class of its receiver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.shared.boxes import Box, extent
from megagrpo.platform.process import user_code
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.box_slices import cover
from megagrpo.weights.slices.tensor_index import ENGINE_DTYPES, TensorIndex

BoxCounts = Counter[tuple[str, Box]]  # (tensor, box) -> how often the loaders fetch it


class BlockSource:
    """The trainer's blocks in one update, as a worker reads them. Only `values` must be overridden.

    `index` lists the tensors and their blocks. `bytes` is the number of bytes read or received so far. Workers with
    different `reader` numbers read an element that several blocks hold from different ones.
    """

    def __init__(self, index: TensorIndex, reader: int = 0):
        self.index, self.reader, self.bytes = index, reader, 0

    def parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Return the disjoint parts that make up `box` of tensor `name`: (index of the block, part). Raises LookupError
        for a part that no rank holds."""
        return cover(box, [block.box for block in self.index.tensors[name].blocks], self.reader)

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return the elements of one of these parts, in its shape and the index's dtype, with any strides. Counts them
        in `bytes`. Raises WeightSyncError when the sender is gone or late."""
        raise NotImplementedError(f"{type(self).__name__} does not define values; add it: docs/transports.md")

    def check(self, name: str, index: int, part: Box, total: int) -> None:
        """Raises WeightSyncError when the source knows the checksum of this part and `total` differs. By default the
        trainer compares all checksums."""

    def proof(self, reads: Mapping[tuple[str, int, Box], int]) -> dict[str, Any]:
        """Return the fields of the report by which the trainer verifies the reads, (tensor, index of the block, part)
        -> checksum: by default all reads."""
        return {"reads": [[name, index, part, total] for (name, index, part), total in reads.items()]}

    def drain(self) -> None:
        """Receive everything that is still in flight, after the loaders have seen every tensor."""

    def release(self) -> None:
        """Release all memory: no more elements will be requested."""


class BlankBlocks(BlockSource):
    """Blocks without data, for a dry run: loaders read zeros, and no checksum is computed."""

    def values(self, name: str, index: int, part: Box) -> Tensor:
        """Return zeros, in the shape of the part and the index's dtype."""
        return torch.zeros(extent(part), dtype=ENGINE_DTYPES[self.index.dtype])


@dataclass(frozen=True)
class Worker:
    """A worker of a vLLM server: its index within the server, and its device. `dry_run` runs the model's loaders on
    zeros, and returns the boxes that they fetch."""

    index: int
    device: torch.device
    dry_run: Callable[[TensorIndex], BoxCounts]


class Receiver:
    """A worker's end of a transport. It lives as long as the worker. Only `open` must be overridden."""

    def __init__(self, worker: Worker):
        self.worker = worker

    def open(self, request: dict[str, Any], version: int) -> BlockSource:
        """Take part in the update to `version`, and return the source of its values. `request` comes from
        `Update.request`. Raises WeightSyncError."""
        raise NotImplementedError

    def report(self, report: dict[str, Any]) -> None:
        """Send this worker's report on the update to the trainer. By default the trainer requests it over HTTP, which
        does not reach all workers of a server with `rollout.dp`."""

    def note(self, activity: str) -> None:
        """Note what this worker does next, for the trainer to read when the worker hangs."""

    def abort(self) -> None:
        """Leave the update after an error; ranks that send to this worker get an error."""

    def close(self) -> None:
        """Free everything. The worker shuts down."""


def receiver_class(name: str) -> type[Receiver]:
    """Return class `name`: `FILE.py:Class` or `package.module:Class`. Raises WeightSyncError when it cannot load."""
    try:
        return user_code.load_subclass(name, Receiver, "open")
    except ValueError as error:
        raise WeightSyncError(f"receiver {name} {error}") from error
