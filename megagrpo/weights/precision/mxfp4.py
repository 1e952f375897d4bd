"""MXFP4 experts of gpt-oss: `*_blocks` holds two codes of 4 bits per byte, `*_scales` one exponent per 32 of them.
Computed as `convert_moe_packed_tensors` of transformers does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megagrpo.weights.precision.view import Get, Slices, Stored, View

_BLOCKS, _SCALES = "_blocks", "_scales"
_CODES = 32  # of one exponent
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1; the fourth bit is the sign


def mxfp4_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in bfloat16, which holds every value, per tensor of experts [experts, in, out].

    Files hold it as [experts, out, in / 32, 16]. Raises ValueError when exponents do not fit their blocks.
    """
    views = {}
    for blocks, shape in stored.items():
        name = blocks.removesuffix(_BLOCKS)
        if name == blocks or (scales := name + _SCALES) not in stored:
            continue
        if len(shape) != 4 or shape[3] != _CODES // 2 or stored[scales] != shape[:3]:
            said = f"{blocks} has shape {shape} and {scales} {stored[scales]}"
            raise ValueError(f"model: {said}, which is not MXFP4; download the folder again")
        experts, out, groups, _ = shape
        read = partial(_read, blocks, scales)
        views[name] = View(torch.bfloat16, (experts, groups * _CODES, out), (blocks, scales), read)
    return views


def _read(blocks: str, scales: str, get: Get, slices: Slices) -> Tensor:
    experts, inner, out = slices
    first = inner.start // _CODES
    groups = slice(first, -(-inner.stop // _CODES))
    codes, exponents = (get(name)[experts, out, groups] for name in (blocks, scales))
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    shape = tuple(part.stop - part.start for part in slices)
    result = torch.empty(shape, dtype=torch.bfloat16)
    own = slice(inner.start - first * _CODES, inner.stop - first * _CODES)
    for expert in range(shape[0]):  # bounds the memory
        pairs = torch.stack([codes[expert] & 0xF, codes[expert] >> 4], dim=-1).flatten(-2)  # [out, groups, 32]
        exact = torch.ldexp(values[pairs.int()], (exponents[expert].int() - 127)[..., None])
        result[expert] = exact.to(torch.bfloat16).flatten(-2)[:, own].T
    return result
