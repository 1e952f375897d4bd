"""Quantizes the fused log-probs' operands to float8_e4m3 with scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.policy.lm_head.vocab_shard import chunks

RECIPES = ("tensorwise", "blockwise")
FP8_BLOCK = 128  # features that share a scale with "blockwise", and rows of a weight that share it
ROWS_AT_A_TIME = 2**14  # rows that exist in float32 at a time; a multiple of FP8_BLOCK


class Factor(NamedTuple):
    """An operand of the kernel: values [rows, H]; with FP8 also float32 scales, [1] or [rows or rows / 128, H / 128],
    else None."""

    values: Tensor
    scales: Tensor | None


def in_fp8(values: Tensor, recipe: str, rows_per_block: int) -> Factor:
    """Quantize `values` [rows, H], any float dtype, to float8_e4m3fn and the float32 scales to multiply it by;
    "blockwise" has one scale per `rows_per_block` x 128.

    Each block's largest element becomes the largest e4m3 number; a block of zeros stays zero. Raises ValueError for
    another recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe: {recipe!r} is not one of {', '.join(RECIPES)}")
    limit = torch.finfo(torch.float8_e4m3fn).max
    rounded = torch.empty_like(values, dtype=torch.float8_e4m3fn)
    if recipe == "tensorwise":
        largest = (
            torch.linalg.vector_norm(values, torch.inf).float()
            if values.numel()
            else values.new_zeros((), dtype=torch.float32)
        )
        scale = torch.where(largest > 0, largest / limit, 1.0)
        for rows in chunks(values.shape[0], ROWS_AT_A_TIME):
            rounded[rows] = (values[rows].float() / scale).clamp_(-limit, limit).to(rounded.dtype)
        return Factor(rounded, scale[None])
    scales = []
    for rows in chunks(values.shape[0], ROWS_AT_A_TIME):
        part = values[rows].float()
        height, width = part.shape
        down, across = -(-height // rows_per_block), -(-width // FP8_BLOCK)
        padded = torch.nn.functional.pad(part, (0, across * FP8_BLOCK - width, 0, down * rows_per_block - height))
        grid = padded.view(down, rows_per_block, across, FP8_BLOCK)
        largest = grid.abs().amax(dim=(1, 3))
        scale = torch.where(largest > 0, largest / limit, 1.0)
        grid = (grid / scale[:, None, :, None]).clamp_(-limit, limit)
        rounded[rows] = grid.view_as(padded)[:height, :width].to(rounded.dtype)
        scales.append(scale)
    return Factor(
        rounded,
        torch.cat(scales) if scales else values.new_zeros(0, -(-values.shape[1] // FP8_BLOCK), dtype=torch.float32),
    )
