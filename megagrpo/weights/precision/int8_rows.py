"""Weights of bitsandbytes' LLM.int8(): `weight` in int8 and `SCB`, the largest magnitude of each row. Computed as its
`int8_vectorwise_dequant` does: in float32, then in config.json's dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megagrpo.weights.precision.view import Get, Scaled, Slices, Stored, View, groups

_LARGEST = "SCB"
_STEP = 0.007874015718698502  # 1 / 127, as bitsandbytes writes it
OF_INT8_PRODUCTS = ("weight_format",)  # last part of the name of a tensor that says how rows are stored


def int8_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in `dtype` per weight with row scales. Raises ValueError when scales do not fit their weight."""
    views = {}
    for scale, rows in stored.items():
        module, _, last = scale.rpartition(".")
        if last != _LARGEST:
            continue
        name = f"{module}.weight"
        if (shape := stored.get(name)) is None or len(shape) != 2 or rows != shape[:1]:
            raise ValueError(f"model: {scale} has shape {rows}, but its weight {shape}; download the folder again")
        views[name] = View(dtype, shape, (name, scale), partial(_read, name, scale, dtype))
    return views


def _read(name: str, scale: str, dtype: torch.dtype, get: Get, slices: Slices) -> Tensor:
    codes, (rows, columns) = get(name)[slices], slices
    scales = get(scale).float()[:, None] * _STEP
    one_group = torch.zeros(columns.stop - columns.start, dtype=torch.int64)
    return Scaled(lambda part: codes[part], scales, groups(rows, 1), one_group, torch.float32).compute(dtype)
