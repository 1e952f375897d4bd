"""Builds models without data, and computes from them which rank holds which blocks, for any layout, in one process.

The training code builds the model once per pipeline stage, from tensors without data. The families' rules then give the
blocks of each rank of that stage."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import table_of
from megagrpo.families.parts.llama_table import EMBEDDING, HEAD
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.boxes import Box
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.parallel.planned_layouts import imagined_layouts
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.weights.blocks.parameter_blocks import blocks, tensor_names


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Tensors created inside this context have a shape and no data, on any requested device."""
    with _Alone(), FakeTensorMode():
        yield


class _Alone(TorchFunctionMode):
    """Skips all-reduces: pipeline stages that share tied embeddings do not make them equal."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return None if func is dist.all_reduce else func(*args, **(kwargs or {}))


_ANY_EXPERT = re.compile(r"(\.experts)\.\d+\.")

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


def tensor_shapes(model: HfConfig, alone: Layout) -> Shapes:
    """Return the shape of every tensor of the whole model, its tied head included.

    `alone` is this process's own layout, with one rank. Of each mixture only the first expert is built, on the first of
    as many ranks as there are experts, because all experts have the same shapes.
    """
    count = model.experts.count if model.experts else 1
    _, layout = next(imagined_layouts(alone, ParallelSection(ep=count), count))
    with without_data():
        chunks = build_model(model, layout, ModelOptions(dtype=torch.bfloat16, init_weights=False))
        built = {block.name: block.shape for _, _, of_one in blocks(chunks, model, layout) for block in of_one}
    if model.tied_embeddings:
        table = table_of(model)
        built.setdefault(table[HEAD].names[0], built[table[EMBEDDING].names[0]])
    return {name: built[_ANY_EXPERT.sub(r"\1.0.", name)] for name in tensor_names(model)}
