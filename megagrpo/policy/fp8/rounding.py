"""Rounding to FP8: tiles of a matrix, their scales, and the nearest FP8 numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Tile = tuple[int, int]


def codes(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Return x * scale [...] of x [...] rounded to `dtype`; the scale broadcasts.

    Values too large saturate at the largest number of `dtype`; NaN stays NaN.
    """
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype)


def scaled(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Return x [...] in float32 after rounding x * scale to `dtype` and dividing by scale. Larger values saturate."""
    return codes(x, dtype, scale).float() / scale


def round_to(x: Tensor, dtype: torch.dtype, tile: Tile, power_of_two: bool = False) -> Tensor:
    """Return x [rows, width] in float32, rounded to `dtype` with one scale per tile."""
    if not x.numel():
        return x.float()
    tiles = tiled(x, tile)
    return untiled(scaled(tiles, dtype, scale_for(largest(tiles), dtype, power_of_two)[:, None, :, None]), x.shape)


def tiled(x: Tensor, tile: Tile) -> Tensor:
    """Cut x [rows, width] into tiles [down, tile's rows, across, tile's width], padded with zeros."""
    (rows, width), (high, wide) = x.shape, tile
    padded = F.pad(x, (0, -width % wide, 0, -rows % high))
    return padded.view(len(padded) // high, high, padded.shape[1] // wide, wide)


def untiled(tiles: Tensor, shape: torch.Size) -> Tensor:
    """Undo `tiled`: return the [rows, width] matrix, without the padding."""
    down, high, across, wide = tiles.shape
    return tiles.reshape(down * high, across * wide)[: shape[0], : shape[1]]


def largest(tiles: Tensor) -> Tensor:
    """Return [down, across] float32: the largest magnitude of each tile."""
    return tiles.abs().amax((1, 3)).float()


def scale_for(magnitudes: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Return float32 scales [...] that map each magnitude [...] to the largest number of `dtype`; with `power_of_two`
    they are rounded down to a power of two.

    The scale is 1 where a magnitude is 0 or not finite.
    """
    scale = (torch.finfo(dtype).max / magnitudes).clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa 2^exponent, mantissa in [1/2, 1)
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    return torch.where(magnitudes.isfinite() & (magnitudes > 0), scale, 1.0)
