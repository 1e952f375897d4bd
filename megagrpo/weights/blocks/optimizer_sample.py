"""Samples the optimizer's state by Hugging Face tensor, up to 64 elements per tensor: enough to recompute an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.blocks import Block
from megagrpo.platform.parallel.agree import run_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.optimizer.policy_optimizer import MegatronOptimizer, held_by
from megagrpo.weights.blocks.parameter_blocks import trained_blocks

SAMPLES = 64  # elements per tensor, before duplicates are removed
Read = Callable[[torch.optim.Optimizer, Tensor], Sequence[Tensor]]


def places_of(name: str, shape: Sequence[int]) -> Tensor:
    """Return a flattened Hugging Face tensor's sampled indices, [n] int64, ascending, from name and shape only."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randint(math.prod(shape), (SAMPLES,), generator=generator).unique()


@torch.no_grad()
def sample(
    chunks: list[nn.Module], hf_config: HfConfig, layout: Layout, built: MegatronOptimizer, read: Read
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return tensor -> (indices [n] int64, values [n, columns] float32) of trained tensors on all ranks. Collective.

    `read(optimizer, main)` returns a main parameter's columns, each sized as `main`. All ranks raise errors of `read`.
    """

    def mine() -> list[tuple[str, Tensor, Tensor, Tensor]]:
        samples = []
        for _, parameter, blocks in trained_blocks(chunks, hf_config, layout):
            if not isinstance(parameter, Tensor):  # the optimizer knows an FP8 parameter, not this view of it
                continue
            for optimizer, start, main in held_by(built, parameter):
                columns = [column.reshape(-1) for column in read(optimizer, main)]
                for block in blocks:
                    places, at = _in_parameter(block, parameter.shape)
                    here = (at >= start) & (at < start + main.numel())
                    if here.any():
                        rows = (at[here] - start).to(main.device)
                        values = torch.stack([column[rows].float().cpu() for column in columns], dim=1)
                        samples.append((block.name, places_of(block.name, block.shape), places[here], values))
        return samples

    whole: dict[str, tuple[Tensor, Tensor]] = {}
    for parts in run_and_agree(layout, mine):
        for name, every, places, values in parts:
            _, table = whole.setdefault(name, (every, torch.full((every.numel(), values.shape[1]), math.nan)))
            table[torch.searchsorted(every, places)] = values
    return whole


def _in_parameter(block: Block, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the sampled indices in this block and those in the flattened local parameter, both [n] int64."""
    places = places_of(block.name, block.shape)
    coordinates = torch.stack(torch.unravel_index(places, block.shape))
    low, high = (torch.tensor(end)[:, None] for end in block.box)
    inside = ((coordinates >= low) & (coordinates < high)).all(dim=0)
    at = torch.zeros(int(inside.sum()), dtype=torch.int64)
    for coordinate, size in zip((coordinates - low)[:, inside], block.block_shape, strict=True):
        at = at * size + coordinate
    view = block.view(torch.empty(tuple(shape), device="meta"))
    local = torch.unravel_index(at, view.shape)
    strided = sum((index * stride for index, stride in zip(local, view.stride(), strict=True)), torch.zeros_like(at))
    return places[inside], strided + int(view.storage_offset())
