"""Computes which rank holds which blocks of a model's tensors, for any layout, in one process.

The training code builds the model once per pipeline stage, from tensors without data. The families' rules then give the
blocks of each rank of that stage."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.scaling.planned_layouts import imagined_layouts
from megagrpo.config import ParallelSection
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.boxes import Box
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.bridge.megatron_io import without_data

Shapes = dict[str, tuple[int, ...]]
Holders = dict[str, dict[Box, list[int]]]  # tensor -> box -> the ranks that hold the box


def held_boxes(model: HfConfig, parallel: ParallelSection, world_size: int, alone: Layout) -> tuple[Shapes, Holders]:
    """Return (tensor -> full shape, tensor -> box -> the ranks that hold the box) for a trainer of `world_size` ranks.

    `alone` is this process's own layout, with one rank. Raises ValueError when the model cannot be cut that way.
    """
    shapes: Shapes = {}
    holders: Holders = {}
    chunks: dict[int, list[nn.Module]] = {}  # for the current pipeline stage; all of its ranks have the same shapes
    for ranks, layout in imagined_layouts(alone, parallel, world_size):
        if layout.pp_rank not in chunks:
            with without_data():
                chunks = {
                    layout.pp_rank: build_model(model, layout, ModelOptions(dtype=torch.bfloat16, init_weights=False))
                }
        for _, _, parameter_blocks in blocks(chunks[layout.pp_rank], model, layout):
            for block in parameter_blocks:
                shapes[block.name] = block.shape
                of_block = holders.setdefault(block.name, {}).setdefault(block.box, [])
                if of_block[-1:] != ranks[-1:]:  # a tied head next to its embedding repeats the block
                    of_block.extend(ranks)
    return shapes, holders
