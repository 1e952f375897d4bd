"""The blocks of one rank, read as parts of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import Box, intersect
from megagrpo.sync.trainer_side.node_shares import BlockKey
from megagrpo.sync.trainer_side.transport import Parameter, Weight, key_of
from megagrpo.sync.wire.copy_checksums import finite_as, first_false
from megagrpo.sync.wire.rank_boxes import RankBoxes
from megagrpo.types import WeightSyncError


class LocalBlocks:
    """The blocks of this rank's `parameters`. Computed or reordered values are cached for one layer."""

    def __init__(self, parameters: Sequence[Weight]):
        self.parameters = parameters
        self.blocks: dict[str, list[tuple[Block, str, Parameter]]] = {}  # tensor -> its blocks, each with its parameter
        for name, param, blocks in parameters:
            for block in blocks:
                of_tensor = self.blocks.setdefault(block.name, [])
                if all(block.box != other.box for other, *_ in of_tensor):
                    of_tensor.append((block, name, param))
        self._layer: int | None = None
        self._values: dict[str, Tensor] = {}  # parameter -> its values
        # (tensor, box) -> the block in the order of the Hugging Face tensor
        self._in_order: dict[tuple[str, Box], Tensor] = {}

    @property
    def keys(self) -> list[BlockKey]:
        """The key of every block."""
        return [key_of(block) for blocks in self.blocks.values() for block, *_ in blocks]

    def check(self, rank_boxes: RankBoxes | None, rank: int, dtype: torch.dtype) -> None:
        """Raises WeightSyncError for NaN or infinite weights in the engine `dtype` or a missing `rank_boxes` block."""
        sent = [(name, param, blocks[0].name) for name, param, blocks in self.parameters if blocks]
        if (bad := first_false([finite_as(param.detach(), dtype) for _, param, _ in sent])) is not None:
            name, _, tensor = sent[bad]
            raise WeightSyncError(f"parameter {name} holds NaN or infinity in its part of {tensor}")
        if rank_boxes is None:
            return
        for name, (_, boxes) in rank_boxes.tensors.items():
            for box, ranks in boxes.items():
                if rank in ranks and all(block.box != box for block, *_ in self.blocks.get(name, ())):
                    raise WeightSyncError(f"{name} was present in the first sync and is missing now")

    def go_to(self, layer: int) -> None:
        """Drop the cache when `layer` differs from the current layer."""
        if layer != self._layer:
            self._layer = layer
            self._values.clear()
            self._in_order.clear()

    def read(self, tensor: str, part: Box) -> Tensor:
        """Return `part` of `tensor`, in its shape and the parameter's dtype. A block of this rank must hold it."""
        block, name, param = next(entry for entry in self.blocks[tensor] if intersect(entry[0].box, part) == part)
        key = tensor, block.box
        if key not in self._in_order:
            if name not in self._values:
                self._values[name] = param.detach()
            self._in_order[key] = block.read(self._values[name])
        return self._in_order[key][tuple(slice(a - o, b - o) for a, b, o in zip(*part, block.box[0], strict=True))]
