"""Which rank of a trainer holds which blocks, for every rank of a layout of any size, known in one process.

The model is built by the code that builds it for training, of tensors that have a shape and no data, once for each pipeline stage; the
families' rules then say what each coordinate of that stage holds.
"""

from __future__ import annotations

import torch
from torch import nn

from megagrpo.bridge.families import blocks
from megagrpo.bridge.without_data import without_data
from megagrpo.config import ParallelSection
from megagrpo.families.architecture import HfConfig
from megagrpo.families.boxes import Box
from megagrpo.parallel.layout import Layout
from megagrpo.parallel.planned_layouts import imagined_layouts
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
            with without_data():
                chunks = {layout.pp_rank: build_model(model, layout, dtype=torch.bfloat16, init_weights=False)}
        for _, _, found in blocks(chunks[layout.pp_rank], model, layout):
            for block in found:
                shapes[block.name] = block.shape
                holders = held.setdefault(block.name, {}).setdefault(block.box, [])
                if holders[-1:] != ranks[-1:]:  # a tied head lies beside the embedding that it equals
                    holders.extend(ranks)
    return shapes, held
