"""Which rank of a trainer holds which blocks, for every rank of a layout of any size, known in one process.

The model is built by the code that builds it for training, of tensors that have a shape and no data, once for each pipeline stage; the
families' rules then say what each coordinate of that stage holds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from megagrpo.boxes import Box
from megagrpo.bridge.families import blocks
from megagrpo.config import ParallelSection
from megagrpo.families.architecture import HfConfig
from megagrpo.parallel.imagined import imagined_layouts
from megagrpo.parallel.layout import Layout
from megagrpo.policy.build import build_model

Shapes = dict[str, tuple[int, ...]]
Held = dict[str, dict[Box, list[int]]]


def held_boxes(model: HfConfig, parallel: ParallelSection, world_size: int, alone: Layout) -> tuple[Shapes, Held]:
    """(tensor -> full shape, tensor -> box -> the ranks that hold it) of a trainer of `world_size` ranks.

    `alone` is this process's own layout, of one rank. ValueError when the model cannot be cut so.
    """
    shapes: Shapes = {}
    held: Held = {}
    chunks: dict[int, list[nn.Module]] = {}  # of each pipeline stage; shapes are the same on all of its ranks
    for ranks, layout in imagined_layouts(alone, parallel, world_size):
        if layout.pp_rank not in chunks:
            with _WithoutData():
                chunks = {layout.pp_rank: build_model(model, layout, dtype=torch.bfloat16, init_weights=False)}
        for _, _, found in blocks(chunks[layout.pp_rank], model, layout):
            for block in found:
                shapes[block.name] = block.shape
                holders = held.setdefault(block.name, {}).setdefault(block.box, [])
                if holders[-1:] != ranks[-1:]:  # a tied head lies beside the embedding that it equals
                    holders.extend(ranks)
    return shapes, held


class _WithoutData(TorchFunctionMode):
    """Tensors that are made inside have a shape and no data, on whatever device they were asked for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _device_constructors():
            kwargs = kwargs | {"device": "meta"}
        elif func is torch.Tensor.to and args[0].is_meta:
            return args[0]
        elif func is dist.all_reduce:  # stages that share tied embeddings make them equal
            return None
        return func(*args, **kwargs)
