"""Quantizes the fused log-probs' operands to float8_e4m3 with scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.policy.fp8.rounding import E4M3, largest, tiled, untiled
from megagrpo.policy.lm_head.vocab_shard import chunks

RECIPES = ("tensorwise", "blockwise")
FP8_BLOCK = 128  # features that share a scale with "blockwise", and rows of a weight that share it
ROWS_AT_A_TIME = 2**14  # rows that exist in float32 at a time; a multiple of FP8_BLOCK


class Factor(NamedTuple):
    """A kernel operand: values [rows, H] and float32 scales, [1] or [rows or rows / 128, H / 128]; None without FP8."""

    values: Tensor
    scales: Tensor | None


def in_fp8(values: Tensor, recipe: str, rows_per_block: int) -> Factor:
    """Quantize `values` [rows, H], any float dtype, to float8_e4m3fn and the float32 scales to multiply it by;
    "blockwise" has one scale per `rows_per_block` x 128.

    A block's largest element becomes the largest e4m3 number; zeros stay zero. Raises ValueError for another recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe: {recipe!r} is not one of {', '.join(RECIPES)}")
    limit, (height, width) = torch.finfo(E4M3).max, values.shape
    rounded, scales = torch.empty_like(values, dtype=E4M3), []
    if recipe == "tensorwise":
        magnitude = torch.linalg.vector_norm(values, torch.inf) if values.numel() else values.new_zeros(())
        scales = [_scale(magnitude.float())[None]]
    for rows in chunks(height, ROWS_AT_A_TIME):
        part = values[rows].float()
        if recipe == "tensorwise":
            part = part / scales[0]
        else:
            tiles = tiled(part, (rows_per_block, FP8_BLOCK))
            scales.append(_scale(largest(tiles)))
            part = untiled(tiles / scales[-1][:, None, :, None], part.shape)
        rounded[rows] = part.clamp_(-limit, limit).to(E4M3)
    empty = values.new_zeros(0, -(-width // FP8_BLOCK), dtype=torch.float32)
    return Factor(rounded, torch.cat(scales) if scales else empty)


def _scale(magnitude: Tensor) -> Tensor:
    """Return float32 scales [...]: each largest magnitude [...] divided by the largest e4m3 number; 1 for 0."""
    return torch.where(magnitude > 0, magnitude / torch.finfo(E4M3).max, 1.0)
