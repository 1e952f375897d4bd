"""Copies with a checksum, and the check for NaN and infinity."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.models.families.boxes import Box, extent

PIECE = 2**18  # elements, at most 1 MiB: a core's L2 cache
_INTEGERS = {2: torch.int16, 4: torch.int32}
_TOO_LARGE = (2 - 2**-8) * 2.0**127  # a float32: bfloat16 rounds this value and larger ones to infinity


class Checked(NamedTuple):
    """The result of a checked copy: the checksum of the copied elements, [] int64 on their device, and the seconds
    spent on the checksum. On a GPU the copy may still run, and the seconds are 0."""

    checksum: Tensor
    seconds: float


def checksum(values: Tensor, column: int = 0) -> int:
    """Return the sum, modulo 2**64, of the elements read as unsigned integers of their own width.

    `values` is [...] float32, bfloat16 or float16, with any strides. Each element is shifted by its position within 8
    bytes of its row, so a row is summed 8 bytes at a time. `column` is the first element's index along the whole
    tensor's last dimension. Checksums of parts add up to the tensor's checksum. The checksum detects lost, zeroed,
    stale and flipped elements, and swapped neighbours. Other swaps, such as of two rows, stay undetected.
    """
    return on_host([device_checksum(values, column)])[0]


def device_checksum(values: Tensor, column: int = 0) -> Tensor:
    """Return `checksum` as a [] int64 tensor on the device of `values`, without waiting. Above 2**63 it is negative."""
    values = values.detach() if values.dim() else values.detach()[None]
    if _whole_words(values, column):
        return values.view(-1).view(torch.int64).sum()
    lanes, width = 8 // values.element_size(), 8 * values.element_size()
    integers = values.view(_INTEGERS[values.element_size()]).to(torch.int64) & (2**width - 1)
    columns = range(min(lanes, values.shape[-1]))
    sums = [integers[..., lane::lanes].sum() << width * ((column + lane) % lanes) for lane in columns]
    return torch.stack(sums).sum() if sums else values.new_zeros((), dtype=torch.int64)


def on_host(sums: Sequence[Tensor]) -> list[int]:
    """Return checksums as integers, modulo 2**64, with one transfer for all."""
    return [total % 2**64 for total in torch.stack(list(sums)).tolist()] if sums else []


def is_host(values: Tensor) -> bool:
    """Return whether the host can read the values without waiting for a GPU."""
    return values.device.type == "cpu"


def _whole_words(values: Tensor, column: int) -> bool:
    lanes = 8 // values.element_size()
    return values.is_contiguous() and not any(n % lanes for n in (values.shape[-1], column, values.storage_offset()))


def copy_checked(target: Tensor, source: Tensor, box: Box) -> Checked:
    """Copy `source` to `target`, cast to the dtype of `target`, and return the checksum of the copy.

    `target` [...] is contiguous and holds the part `box` of a tensor in its order. `source` [...] has as many elements,
    in any shape that the order allows, and any strides. Dtypes are float32, bfloat16 or float16, and may differ. On a
    GPU the host does not wait. On a CPU each piece is checked while it is in the cache.
    """
    whole, column = target.view(extent(box) or (1,)), box[0][-1] if box[0] else 0
    pieces = [(target.view(source.shape), source, whole)]
    if is_host(target) and source.is_contiguous() and _whole_words(whole, column):
        parts = zip(target.view(-1).split(PIECE), source.reshape(-1).split(PIECE), strict=True)
        pieces, column = [(piece, part, piece) for piece, part in parts], 0
    sums, seconds = [], 0.0
    for piece, part, checked in pieces:
        piece.copy_(part)
        started = time.perf_counter()
        sums.append(device_checksum(checked, column))
        seconds += time.perf_counter() - started
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return Checked(total, seconds if is_host(target) else 0.0)


def finite_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [] bool, on the device of `values` [...]: whether all of them are finite in `dtype`, to which they will be
    cast. The host does not wait for a GPU."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    limit = _TOO_LARGE if (values.dtype, dtype) == (torch.float32, torch.bfloat16) else math.inf
    low, high = values.aminmax()  # NaN if any value is NaN
    return (low > -limit) & (high < limit)


def first_false(flags: Sequence[Tensor]) -> int | None:
    """Return the index of the first False [] bool tensor, or None. One transfer brings the flags from their device."""
    numbers = torch.stack(list(flags)).tolist() if flags else []
    return next((index for index, fine in enumerate(numbers) if not fine), None)
