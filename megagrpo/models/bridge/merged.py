"""The model's effective weights: adapters are added to the weights of their linears."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.models.bridge.parameter_blocks import Parameter, blocks
from megagrpo.models.families.blocks import Block
from megagrpo.models.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.lora_layers import LowRank


@dataclass(frozen=True)
class Merged:
    """The merged weight W + scale B A of one parameter on this rank, float32.

    Every read of `data` or `detach()` computes it again; nothing is cached. `parts` has the block and adapter of each
    projection. A rank holds all of B A that its part of W needs, so there is no communication.
    """

    weight: Parameter
    parts: tuple[tuple[Block, LowRank], ...]
    scale: float

    dtype = torch.float32

    @property
    def data(self) -> Tensor:
        """The merged weight [out, in] of this rank, float32."""
        return self.detach()

    @torch.no_grad()
    def detach(self) -> Tensor:
        """Return the merged weight [out, in] of this rank, float32."""
        merged = self.weight.detach().to(torch.float32, copy=True)
        for block, low_rank in self.parts:
            view = block.view(merged)
            view.add_(
                (_rows(low_rank.lora_B, block).float() @ low_rank.lora_A.float()).view(view.shape), alpha=self.scale
            )
        return merged


def _rows(b: Tensor, block: Block) -> Tensor:
    """Return the rows of B [out, rank] for the block's rows of the weight. The rows of a fused projection are a part of
    B, ordered like the weight."""
    if len(b) == block.block_shape[0]:
        return b
    return dataclasses.replace(block, grid=(*block.grid[:-1], b.shape[1])).view(b).reshape(-1, b.shape[1])


def merged_blocks(
    chunks: list[nn.Module], hf_config: HfConfig, layout: Layout
) -> Iterator[tuple[str, Parameter | Merged, list[Block]]]:
    """Like `blocks`, with a `Merged` in place of every weight with adapters. Exports and the engine use these
    blocks."""
    modules: dict[str, nn.Module] = {}
    for i, chunk in enumerate(chunks):
        modules |= {f"chunk{i}.{name}" if i else name: module for name, module in unwrap_model(chunk).named_modules()}
    for name, param, parameter_blocks in blocks(chunks, hf_config, layout):
        adapter = getattr(modules[name.rpartition(".")[0]], "adapter", None)
        if adapter is None or not name.endswith(".weight"):
            yield name, param, parameter_blocks
            continue
        parts = ((block, projection(block)) for block in parameter_blocks)
        adapted = tuple((block, adapter[part]) for block, part in parts if part in adapter)
        yield name, Merged(param, adapted, adapter.scale), parameter_blocks


def projection(block: Block) -> str:
    """Return the projection of a block of a linear's weight, such as q_proj."""
    return block.name.split(".")[-2]
