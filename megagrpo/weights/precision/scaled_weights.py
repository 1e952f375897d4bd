"""FP8 weights with a scale per block or one per tensor: codes times scales in float32, then in config.json's dtype.

DeepSeek-V3's and Qwen3's releases hold `weight` and `weight_scale_inv`: inference/fp8_cast_bf16.py of DeepSeek-V3 and
`Fp8Dequantize` of transformers compute them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megagrpo.weights.precision.view import Get, Scaled, Slices, Stored, View, groups

_SCALE = "_scale_inv"
OF_FP8_PRODUCTS = ("activation_scale", "input_scale")  # last parts of the names of tensors that products use


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
        views[name] = View(dtype, shape, (name, scale), partial(_read, name, scale, block, dtype))
    return views


def _read(name: str, scale: str, block: tuple[int, int], dtype: torch.dtype, get: Get, slices: Slices) -> Tensor:
    codes, scales = get(name)[slices], get(scale)
    if scales.dim() < 2:  # one
        scales = scales.reshape(-1, 1).float()
    row_groups, column_groups = (groups(part, size) for part, size in zip(slices, block, strict=True))
    return Scaled(lambda rows: codes[rows], scales, row_groups, column_groups, torch.float32).compute(dtype)
