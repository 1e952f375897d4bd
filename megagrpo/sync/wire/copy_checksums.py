"""Copies with a checksum, and the check for NaN and infinity."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.families.shared.boxes import Box, extent, whole

PIECE = 2**18  # elements, at most 1 MiB: a core's L2 cache
_PRODUCTS = 2**20  # words of a temporary tensor on a GPU, 8 MiB
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_TOO_LARGE = {torch.bfloat16: (2 - 2**-8) * 2.0**127, torch.float16: 65520.0}  # they round this float32 to infinity


class Checked(NamedTuple):
    """The result of a checked copy: the checksum of the copied elements, [] int64 on their device, and the seconds
    spent on the checksum. On a GPU the copy may still run, and the seconds are 0."""

    checksum: Tensor
    seconds: float


def checksum(values: Tensor, box: Box | None = None) -> int:
    """Return the sum, modulo 2**64, of the words of 8 bytes along the rows, each times an odd weight of its position.

    `values` is [...] float32, bfloat16, float16 or FP8, with any strides. It holds the part `box` of a tensor, by
    default all of it. With n elements in 8 bytes, column c of a row is element c % n of word c // n. The weight of a
    word is the product of pseudo-random weights: of its index in the row, and of each index of the row. Checksums of
    parts add up to the tensor's checksum. The checksum detects lost, zeroed, stale and flipped elements, and
    permutations: of rows, columns, halves, experts or neighbours. If just two elements are exchanged, both in the last
    place of a word, their difference counts modulo 2**(width - 1): equal numbers of opposite sign stay undetected.
    """
    return on_host([device_checksum(values, box)])[0]


def device_checksum(values: Tensor, box: Box | None = None) -> Tensor:
    """Return `checksum` as a [] int64 tensor on the device of `values`, without waiting. Above 2**63 it is negative."""
    values = values.detach() if values.dim() else values.detach()[None]
    first = (box or whole(values.shape))[0] or (0,)
    of_rows = row_weights(first[:-1], values.shape[:-1], values.device)
    return _weighted_sum(values, of_rows, first[-1])


def _weighted_sum(values: Tensor, of_rows: Tensor, column: int) -> Tensor:
    """Return the checksum, [] int64, of `values` [..., n], whose rows have the weights `of_rows` [...] int64. `column`
    is the index of their first element."""
    lanes, width = 8 // values.element_size(), 8 * values.element_size()
    if _whole_words(values, column):
        lane_values = [(column, values.view(torch.int64))]
    else:
        integers = values.view(_INTEGERS[values.element_size()]).to(torch.int64) & (2**width - 1)
        shifts = [width * ((column + lane) % lanes) for lane in range(min(lanes, values.shape[-1]))]
        lane_values = [(column + lane, integers[..., lane::lanes] << shift) for lane, shift in enumerate(shifts)]
    sums, of_rows = [], of_rows.reshape(-1)
    for start, words in lane_values:
        of_columns = position_weights(0, start // lanes, words.shape[-1], values.device)
        rows = words.reshape(-1, len(of_columns))
        if is_host(values):
            sums.append(torch.mv(rows.t(), of_rows).dot(of_columns))  # in one pass, without a temporary tensor
            continue
        step = max(1, _PRODUCTS // len(of_columns))  # torch multiplies no matrices of integers on a GPU
        pieces = zip(rows.split(step), of_rows.split(step), strict=True)
        sums += [((piece * of_columns).sum(-1) * weights).sum() for piece, weights in pieces]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=values.device)


def row_weights(first: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the weights [*shape] int64 of the rows whose indices begin at `first`. A vector is one row of weight 1."""
    weights = torch.ones((), dtype=torch.int64, device=device)
    for dim, (start, count) in enumerate(zip(reversed(first), reversed(shape), strict=True), 1):
        weights = position_weights(dim, start, count, device).view(-1, *[1] * (dim - 1)) * weights
    return weights


def position_weights(dim: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return the weights [count] int64, odd, of the indices from `start` along a dimension, counted from the last one:
    0 is the dimension of words in a row."""
    return position_table(dim, 1 << (start + count).bit_length(), device)[start : start + count]


@lru_cache(maxsize=256)
def position_table(dim: int, count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers [count] int64, of the generator splitmix64 from a start of each dimension."""
    with torch.inference_mode(False):
        numbers = (torch.arange(count, device=device) + (dim << 40)) * (0x9E3779B97F4A7C15 - 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
            numbers = (numbers ^ (numbers >> shift & 2 ** (64 - shift) - 1)) * factor
        return numbers | 1


def on_host(sums: Sequence[Tensor]) -> list[int]:
    """Return checksums as integers, modulo 2**64, with one transfer for all."""
    return [total % 2**64 for total in torch.stack(list(sums)).tolist()] if sums else []


def is_host(values: Tensor) -> bool:
    """Return whether the host can read the values without waiting for a GPU."""
    return values.device.type == "cpu"


def _whole_words(values: Tensor, column: int) -> bool:
    """Whether the rows of `values` [..., n] can be read in whole words of 8 bytes."""
    lanes = 8 // values.element_size()
    starts = (*values.stride()[:-1], values.shape[-1], column, values.storage_offset())
    return bool(values.numel()) and values.stride(-1) == 1 and not any(n % lanes for n in starts)


def copy_checked(target: Tensor, source: Tensor, box: Box) -> Checked:
    """Copy `source` to `target`, cast to the dtype of `target`, and return the checksum of the copy.

    `target` [...] is contiguous and holds the part `box` of a tensor in its order. `source` [...] has as many elements,
    in any shape that the order allows, and any strides. Dtypes are float32, bfloat16 or float16, and may differ. On a
    GPU the host does not wait. On a CPU each piece is checked while it is in the cache.
    """
    shape, first = extent(box) or (1,), box[0] or (0,)
    of_rows = row_weights(first[:-1], shape[:-1], target.device).reshape(-1)
    rows = target.view(len(of_rows), shape[-1])
    pieces = [(target.view(source.shape), source, rows, of_rows)]
    if is_host(target) and source.is_contiguous() and target.numel():
        step = max(1, PIECE // shape[-1])
        parts = zip(rows.split(step), source.reshape(rows.shape).split(step), of_rows.split(step), strict=True)
        pieces = [(piece, part, piece, weights) for piece, part, weights in parts]
    sums, seconds = [], 0.0
    for piece, part, checked, weights in pieces:
        piece.copy_(part)
        started = time.perf_counter()
        sums.append(_weighted_sum(checked, weights, first[-1]))
        seconds += time.perf_counter() - started
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return Checked(total, seconds if is_host(target) else 0.0)


def finite_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [] bool, on the device of `values` [...]: whether all of them are finite in `dtype`, to which they will be
    cast. The host does not wait for a GPU."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    limit = _TOO_LARGE.get(dtype, math.inf) if values.dtype == torch.float32 else math.inf
    low, high = values.aminmax()  # NaN if any value is NaN
    return (low > -limit) & (high < limit)


def first_false(flags: Sequence[Tensor]) -> int | None:
    """Return the index of the first False [] bool tensor, or None. One transfer brings the flags from their device."""
    numbers = torch.stack(list(flags)).tolist() if flags else []
    return next((index for index, fine in enumerate(numbers) if not fine), None)
