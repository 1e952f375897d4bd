"""FP8 weights with a scale per block or one per tensor, and int8 weights with a scale per row: codes times scales in
float32, then in config.json's dtype.

DeepSeek-V3's and Qwen3's releases hold `weight` and `weight_scale_inv`: inference/fp8_cast_bf16.py of DeepSeek-V3 and
`Fp8Dequantize` of transformers compute them. bitsandbytes' LLM.int8() holds `weight` and `SCB`, the largest magnitude
of each row, and computes them in `int8_vectorwise_dequant`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megagrpo.weights.precision.view import Get, Scaled, Slices, Stored, View, groups

_SCALE, _LARGEST = "_scale_inv", ".SCB"
_STEP = 0.007874015718698502  # 1 / 127, as bitsandbytes writes it
# Last parts of the names of tensors that products use: scales of activations, and how rows are stored.
OF_FP8_PRODUCTS = ("activation_scale", "input_scale")
OF_INT8_PRODUCTS = ("weight_format",)


def fp8_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in `dtype` per weight with a scale. Raises ValueError when a scale fits no blocks of its weight."""
    views = {}
    for scale, grid in stored.items():
        name = scale.removesuffix(_SCALE)
        if name == scale or name not in stored:
            continue
        shape = stored[name]
        block = tuple(config.get("weight_block_size") or shape)
        blocks = tuple(-(-n // size) for n, size in zip(shape, block, strict=False))
        if len(shape) != 2 or (grid != blocks and (blocks != (1, 1) or grid not in ((), (1,)))):
            raise ValueError(
                f"model: {scale} has shape {grid}, but {name} of shape {shape} has {blocks} blocks of {block}; "
                "weight_block_size in config.json belongs to another model"
            )
        views[name] = View(dtype, shape, (name, scale), partial(_read, name, scale, block, 1.0, dtype))
    return views


def int8_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in `dtype` per weight with row scales. Raises ValueError when scales do not fit their weight."""
    views = {}
    for scale, rows in stored.items():
        module = scale.removesuffix(_LARGEST)
        if module == scale:
            continue
        name = f"{module}.weight"
        if (shape := stored.get(name)) is None or len(shape) != 2 or rows != shape[:1]:
            raise ValueError(f"model: {scale} has shape {rows}, but its weight {shape}; download the folder again")
        views[name] = View(dtype, shape, (name, scale), partial(_read, name, scale, (1, shape[1]), _STEP, dtype))
    return views


def _read(
    name: str, scale: str, block: tuple[int, int], step: float, dtype: torch.dtype, get: Get, slices: Slices
) -> Tensor:
    codes, scales = get(name)[slices], get(scale)
    if scales.dim() < 2:  # one per row, or one
        scales = scales.reshape(-1, 1).float() * step
    row_groups, column_groups = (groups(part, size) for part, size in zip(slices, block, strict=True))
    return Scaled(lambda rows: codes[rows], scales, row_groups, column_groups, torch.float32).compute(dtype)
