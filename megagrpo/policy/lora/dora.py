"""Row norms of W + scale B A for DoRA (Liu et al. 2024, arXiv 2402.09353): W' = magnitude (W + scale B A) / norm.

The norm of a row is over all input columns. As in the paper and in PEFT it has no gradient. A row-parallel linear has
some of the columns on each rank, so its squares are summed over the tensor-parallel ranks: [out] numbers per linear, in
one all-reduce for all linears of a rank. The norms are computed before a pass, and stay until the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.policy.lora.lora_layers import ADAPTER_MODULE

BLOCK_ELEMENTS = 2**24  # largest part of W + scale B A that exists at a time


@torch.no_grad()
def update_norms(chunks: Sequence[nn.Module]) -> None:
    """Compute the norms of all linears with DoRA from the present weights. Collective over tensor-parallel ranks."""
    partial, group = [], None
    linears = list(_linears(chunks))
    for linear in linears:
        adapter, weight = linear.adapter, getattr(linear, "stored", linear.weight).detach()
        rows = weight.view(adapter.groups, -1, weight.shape[1]).split(list(adapter.parts.values()), dim=1)
        for name, of_part in zip(adapter.parts, rows, strict=True):
            if name in adapter:
                a, b = adapter[name].lora_A, adapter.own_rows(name, adapter[name].lora_B)
                adapter.norms[name] = squares = _squares(of_part.flatten(0, 1), a, b, adapter.scale)
                if adapter.cut[0] is not None:
                    group = adapter.tp_group
                    partial.append(squares)
    if group is not None and group.size() > 1:
        summed = torch.cat(partial)
        dist.all_reduce(summed, group=group)
        for squares, total in zip(partial, summed.split([len(each) for each in partial]), strict=True):
            squares.copy_(total)
    for linear in linears:
        for squares in linear.adapter.norms.values():
            squares.sqrt_().clamp_(min=torch.finfo(squares.dtype).tiny)  # a row of zeros


@torch.no_grad()
def start_magnitudes(chunks: Sequence[nn.Module]) -> None:
    """Set the magnitudes to the norms of the present weights, so that a fresh adapter adds nothing. Collective."""
    update_norms(chunks)
    for adapter in (linear.adapter for linear in _linears(chunks)):
        for name, norms in adapter.norms.items():
            magnitudes = adapter[name].lora_magnitude_vector.detach().zero_()
            adapter.own_rows(name, magnitudes).copy_(norms)
            if len(norms) < len(magnitudes):  # every rank holds those of all ranks
                dist.all_reduce(magnitudes, group=adapter.tp_group)


def _linears(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        for module in unwrap_model(chunk).modules():
            if getattr(getattr(module, ADAPTER_MODULE, None), "use_dora", False):
                yield module


def _squares(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the squared norm of each row of weight + scale b a, [rows] in at least float32, from weight [rows, in]."""
    wide, count = torch.promote_types(weight.dtype, torch.float32), max(1, BLOCK_ELEMENTS // weight.shape[1])
    a = a.to(wide)
    sums = [
        torch.addmm(of_block.to(wide), of_b.to(wide), a, alpha=scale).square().sum(dim=1)
        for of_block, of_b in zip(weight.split(count), b.split(count), strict=True)
    ]
    return torch.cat(sums)
