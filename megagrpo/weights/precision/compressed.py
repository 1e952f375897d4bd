"""compressed-tensors' weights: `weight` in FP8 or int8, or int32 words of several codes (`weight_packed`), with
`weight_scale` per tensor, row, group of columns or block. Computed as that package's `decompress` does: in the dtype of
the scales, then in config.json's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagrpo.weights.precision.view import Get, Scaled, Slices, Stored, View, groups

_WEIGHT, _PACKED = "weight", "weight_packed"
# Last parts of names: of the tensors beside a weight, and of the tensors that only quantized products and caches use.
_BESIDE = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
OF_COMPRESSED_PRODUCTS = (
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    *("k_scale", "v_scale", "q_scale"),
)
_WORD = 32  # bits


def compressed_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in `dtype` per weight with scales. Raises ValueError when tensors do not fit the configuration."""
    weights = next(iter(config["config_groups"].values()))["weights"]  # those of all groups are alike
    views = {}
    for scale in stored:
        module, _, last = scale.rpartition(".")
        if last != "weight_scale":
            continue
        codes = next((name for last in (_PACKED, _WEIGHT) if (name := f"{module}.{last}") in stored), None)
        if codes is None:
            raise ValueError(f"model: the files hold {scale}, but no weight beside it; download the folder again")
        matrix = _Matrix.of(module, codes, weights, stored, dtype)
        parts = (codes, *(name for last in _BESIDE if (name := f"{module}.{last}") in stored))
        views[f"{module}.{_WEIGHT}"] = View(dtype, matrix.shape, parts, matrix.read)
    return views


@dataclass(frozen=True)
class _Matrix:
    """One weight [rows, columns] of `module`: `bits` per code in words, 0 if codes are not packed; elements `per_scale`
    along rows and columns that share a scale."""

    module: str
    shape: tuple[int, int]
    per_scale: tuple[int, int]
    bits: int
    zeros: bool
    ordered: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, module: str, codes: str, weights: dict[str, Any], stored: Stored, dtype: torch.dtype) -> _Matrix:
        """Return the matrix of these tensors. Raises ValueError when their shapes do not fit `weights`."""
        packed, shape = codes.endswith(_PACKED), stored[codes]
        if len(shape) != 2:
            raise ValueError(f"model: {codes} has shape {shape}; only matrices are supported")
        grid, bits = stored[f"{module}.weight_scale"], weights["num_bits"] if packed else 0
        per_word = _WORD // bits if packed else 1
        columns = shape[1] * per_word
        size, block = weights.get("group_size") or 1, weights.get("block_structure")
        if weights["strategy"] == "group" and len(grid) == 2 and -(-grid[1] * size // per_word) == shape[1]:
            columns = grid[1] * size  # the last word may have room for more
        matrix = shape[0], columns
        per_scale = {"tensor": matrix, "channel": (1, columns), "group": (1, size), "block": tuple(block or ())}[
            weights["strategy"]
        ]
        expected = tuple(-(-n // one) for n, one in zip(matrix, per_scale, strict=True))
        if math.prod(grid) != math.prod(expected) or (len(grid) == 2 and grid != expected):
            raise ValueError(
                f"model: {module}.weight_scale has shape {grid}, but the {matrix} weight has scales of shape "
                f"{expected} ({weights['strategy']}); quantization_config belongs to another model"
            )
        zeros, ordered = f"{module}.weight_zero_point" in stored, f"{module}.weight_g_idx" in stored
        return cls(module, matrix, per_scale, bits, zeros and not weights["symmetric"], ordered, dtype)

    def read(self, get: Get, slices: Slices) -> Tensor:
        """Return the box `slices`. Raises ValueError when `weight_shape` has another shape."""
        rows, columns = slices
        if self.bits and tuple(true := get(f"{self.module}.weight_shape").tolist()) != self.shape:
            said = f"{self.module}.weight_shape is {true}, but words and scales are of a weight {self.shape}"
            raise ValueError(f"model: {said}; use the original weights")
        scales = get(f"{self.module}.weight_scale")
        scales = scales.reshape([-(-n // size) for n, size in zip(self.shape, self.per_scale, strict=True)])
        if self.bits:
            first = columns.start // (_WORD // self.bits)
            words = get(f"{self.module}.{_PACKED}")[rows, first : -(-columns.stop // (_WORD // self.bits))]
            own = slice(columns.start - first * (_WORD // self.bits), columns.stop - first * (_WORD // self.bits))
            codes = lambda part: _unpacked(words[part], self.bits)[:, own]  # noqa: E731
        else:
            stored = get(f"{self.module}.{_WEIGHT}")[slices]
            codes = lambda part: stored[part]  # noqa: E731
        column_groups = groups(columns, self.per_scale[1])
        if self.ordered and (order := get(f"{self.module}.weight_g_idx")).min() >= 0:
            places = torch.argsort(torch.argsort(order, stable=True))  # of each column, sorted by group
            column_groups = places[columns] // self.per_scale[1]
        row_groups = groups(rows, self.per_scale[0])
        return Scaled(codes, scales, row_groups, column_groups, scales.dtype, self._zeros(get)).compute(self.dtype)

    def _zeros(self, get: Get) -> Tensor | None:
        if not self.zeros:
            return None
        stored = get(f"{self.module}.weight_zero_point")
        if self.bits and stored.dtype == torch.int32:  # packed along the rows
            return _unpacked(stored.T, self.bits).T[: -(-self.shape[0] // self.per_scale[0])]
        return stored.reshape([-(-n // size) for n, size in zip(self.shape, self.per_scale, strict=True)])


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes [rows, columns x codes per word] of int32 words [rows, columns], the lowest bits first."""
    shifts = torch.arange(_WORD // bits, dtype=torch.int32) * bits
    return (((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2) - 2 ** (bits - 1)).to(torch.int8)
