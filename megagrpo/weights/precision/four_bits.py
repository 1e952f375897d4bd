"""Weights of bitsandbytes in 4 bits, NF4 or FP4: `weight` has two codes per byte, `weight.absmax` the largest magnitude
of each block of elements, itself quantized in most files. `weight.quant_state...` is JSON with the shape and the sizes
of blocks. Computed as bitsandbytes' `dequantize_4bit` does: in float32, then in the JSON's dtype, then in
config.json's."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagrpo.weights.precision.view import Get, Slices, Stored, View, row_chunks

_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map")
_NESTED = ("nested_absmax", "nested_quant_map")
_DTYPES = ("float16", "bfloat16", "float32")


def four_bit_views(stored: Stored, dtype: torch.dtype, get: Get) -> dict[str, View]:
    """Return a view in `dtype` per weight in 4 bits; `get` reads its JSON. Raises ValueError when that is not of such a
    weight, or a tensor is missing."""
    views = {}
    for key in stored:
        name, found, _ = key.partition(_STATE)
        if not found:
            continue
        state = _state(key, get)
        nested = _NESTED if "nested_offset" in state else ()
        parts = (name, *(f"{name}.{part}" for part in (*_PARTS, *nested)), key)
        if lacks := [part for part in parts if part not in stored]:
            raise ValueError(f"model: the files lack {lacks[0]} beside {key}; download the folder again")
        views[name] = View(dtype, state["shape"], parts, _Matrix(name, dtype, **state).read)
    return views


def _state(key: str, get: Get) -> dict[str, Any]:
    """Return the fields of `_Matrix` in the JSON tensor `key`."""
    try:
        raw = json.loads(bytes(get(key).tolist()))
        rows, columns = raw["shape"]
        assert raw["dtype"] in _DTYPES and raw["blocksize"] % 2 == 0, "dtype or blocksize"
        state = dict(shape=(int(rows), int(columns)), block=int(raw["blocksize"]), math=getattr(torch, raw["dtype"]))
        if "nested_offset" in raw:
            state |= dict(nested_block=int(raw["nested_blocksize"]), nested_offset=float(raw["nested_offset"]))
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        said = f"{key} does not describe a matrix in 4 bits of bitsandbytes: {error!r}"
        raise ValueError(f"model: {said}; download the folder again") from None
    return state


@dataclass(frozen=True)
class _Matrix:
    """The weight `name` in 4 bits. `block` elements, row by row, share a magnitude. With `nested_offset` the magnitudes
    are codes of 8 bits, whose blocks of `nested_block` share one too."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    block: int
    math: torch.dtype
    nested_block: int = 0
    nested_offset: float | None = None

    def read(self, get: Get, slices: Slices) -> Tensor:
        """Return the box `slices`."""
        (rows, columns), width = slices, self.shape[1]
        codes, magnitudes = get(self.name).flatten().view(torch.uint8), self._magnitudes(get)
        elements, values = math.prod(self.shape), get(f"{self.name}.quant_map").float()
        wanted = -(-elements // 2), -(-elements // self.block), 16
        if (found := (codes.numel(), magnitudes.numel(), values.numel())) != wanted:
            said = f"{self.name} has {found[0]} bytes, {found[1]} magnitudes and {found[2]} values; {self.shape} needs"
            raise ValueError(f"model: {said} {wanted[0]}, {wanted[1]} and {wanted[2]}; download the folder again")
        pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)  # by byte; the upper bits come first
        out = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=self.dtype)
        for part in row_chunks(len(out), width):
            first, last = ((rows.start + row) * width for row in (part.start, part.stop))  # elements
            start = first // self.block * self.block
            value = pairs[codes[start // 2 : -(-last // 2)].int()].flatten()
            spread = magnitudes[start // self.block : -(-last // self.block)].repeat_interleave(self.block)
            value = (value * spread[: len(value)])[first - start : last - start]
            out[part] = value.view(-1, width)[:, columns].to(self.math)
        return out

    def _magnitudes(self, get: Get) -> Tensor:
        """Return the largest magnitude of each block, in float32."""
        stored = get(f"{self.name}.absmax").flatten()
        if self.nested_offset is None:
            return stored.float()
        outer, values = (get(f"{self.name}.{part}").float() for part in _NESTED)
        spread = outer[torch.arange(len(stored)) // self.nested_block]
        return values[stored.int()] * spread + torch.tensor(self.nested_offset)
