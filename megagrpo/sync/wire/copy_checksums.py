"""Copies with a checksum. Memory is read once: each chunk is checked while it is still in the cache."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagrpo.models.families.boxes import Box, extent

CHUNK = 2**18  # bytes: a quarter of a core's L2 cache
_INTEGERS = {2: torch.int16, 4: torch.int32}
_TOO_LARGE = (2 - 2**-8) * 2.0**127  # a float32: bfloat16 rounds this value and larger ones to infinity


class Checked(NamedTuple):
    """The result of a checked copy: the checksum of the copied elements, and the seconds spent on the checksum.

    On a GPU the checksum is a [] int64 tensor there (`on_host` transfers many at once), and the copy may still run.
    """

    checksum: int | Tensor
    seconds: float


def checksum(values: Tensor, column: int = 0) -> int:
    """Return the sum, modulo 2**64, of the elements read as unsigned integers of their own width.

    `values` is [...] float32, bfloat16 or float16, with any strides. Each element is shifted by its position within 8
    bytes of its row, so a row is summed 8 bytes at a time. `column` is the index of the first element along the last
    dimension of the whole tensor. The checksums of the parts of a tensor add up to the checksum of the tensor. The
    checksum detects lost, zeroed, stale and flipped elements, and swapped neighbours. It does not detect other swaps,
    such as two swapped rows.
    """
    values = values.detach() if values.dim() else values.detach()[None]
    if is_host(values) and _whole_words(values, column):
        return int(values.view(-1).view(torch.int64).numpy().sum()) % 2**64
    return int(device_checksum(values, column)) % 2**64


def device_checksum(values: Tensor, column: int = 0) -> Tensor:
    """Return `checksum` as a [] int64 tensor on the device of `values`, without waiting for it. Sums above 2**63 are
    negative."""
    values = values.detach() if values.dim() else values.detach()[None]
    if _whole_words(values, column):
        return values.view(-1).view(torch.int64).sum()
    lanes, width = 8 // values.element_size(), 8 * values.element_size()
    integers = values.view(_INTEGERS[values.element_size()]).to(torch.int64) & (2**width - 1)
    columns = range(min(lanes, values.shape[-1]))
    sums = [integers[..., lane::lanes].sum() << width * ((column + lane) % lanes) for lane in columns]
    return torch.stack(sums).sum() if sums else values.new_zeros((), dtype=torch.int64)


def on_host(sums: Sequence[int | Tensor]) -> list[int]:
    """Return checksums as integers, modulo 2**64, with one transfer for all that are on a device."""
    there = [total for total in sums if isinstance(total, Tensor)]
    numbers = iter(torch.stack(there).tolist() if there else ())
    return [(next(numbers) if isinstance(total, Tensor) else total) % 2**64 for total in sums]


def is_host(values: Tensor) -> bool:
    """Return whether the host can read the values without waiting for a GPU."""
    return values.device.type == "cpu"


def _whole_words(values: Tensor, column: int) -> bool:
    lanes = 8 // values.element_size()
    return values.is_contiguous() and not (
        values.shape[-1] % lanes or column % lanes or values.storage_offset() % lanes
    )


def copy_checked(target: Tensor, source: Tensor, box: Box) -> Checked:
    """Copy `source` to `target`, cast to the dtype of `target`, and return the checksum of the copy.

    `target` [...] is contiguous and holds the part `box` of a tensor in its order. `source` [...] has as many elements,
    in any shape that the order allows, and any strides. Dtypes are float32, bfloat16 or float16, and may differ. On a
    GPU the host does not wait.
    """
    shape = extent(box) or (1,)
    column = box[0][-1] if box[0] else 0
    if not is_host(target):
        target.view(source.shape).copy_(source)
        return Checked(device_checksum(target.view(shape), column), 0.0)
    lanes = 8 // target.element_size()
    whole_words = not (shape[-1] % lanes or column % lanes or target.storage_offset() % lanes)
    flat = target.view(-1)
    bits, same_format = _bits(flat), target.dtype == source.dtype and source.device.type == "cpu"
    words = bits.view(np.int64) if whole_words else None
    total, at, seconds, limit = 0, 0, 0.0, CHUNK // target.element_size()
    pieces: Iterator[Tensor] | Iterator[np.ndarray] = (
        _pieces(_bits(source), limit) if same_format else _pieces(source, limit)
    )
    for piece in pieces:
        count = math.prod(piece.shape)
        # NumPy copies on this thread: a chunk is done before a thread of a pool would wake up
        if isinstance(piece, np.ndarray):
            np.copyto(bits[at : at + count].reshape(piece.shape), piece)
        else:
            flat[at : at + count].view(piece.shape).copy_(piece)
        started = time.perf_counter()
        if words is not None:
            total += int(np.add.reduce(words[at // lanes : (at + count) // lanes]))
        seconds += time.perf_counter() - started
        at += count
    if whole_words:
        return Checked(total % 2**64, seconds)
    started = time.perf_counter()
    return Checked(checksum(target.view(shape), column), seconds + time.perf_counter() - started)


def finite_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [] bool, on the device of `values` [...]: whether all of them are finite in `dtype`, to which they will be
    cast. The host does not wait for a GPU."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    limit = _TOO_LARGE if (values.dtype, dtype) == (torch.float32, torch.bfloat16) else math.inf
    low, high = values.aminmax()  # NaN if any value is NaN
    return (low > -limit) & (high < limit)


def first_false(flags: Sequence[Tensor]) -> int | None:
    """Return the index of the first [] bool tensor that is False, or None. The flags are on one device; one transfer
    brings them."""
    numbers = torch.stack(list(flags)).tolist() if flags else []
    return next((index for index, fine in enumerate(numbers) if not fine), None)


def _pieces[T: (Tensor, np.ndarray)](source: T, limit: int) -> Iterator[T]:
    """Yield parts of `source` [...] with at most `limit` elements each, in element order. Each part is a range of one
    dimension and whole in all later dimensions."""
    shape = source.shape
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dim = next((dim for dim, count in enumerate(inner) if count <= limit), len(shape))
    if dim == len(shape):
        yield source  # zero or one element
        return
    step = max(1, limit // max(1, inner[dim]))
    for outer in itertools.product(*map(range, shape[:dim])):
        row = source[outer]
        for start in range(0, shape[dim], step):
            yield row[start : start + step]


def _bits(values: Tensor) -> np.ndarray:
    """Return the elements of `values` [...] as integers of their own width, same shape and strides, because NumPy has
    no bfloat16."""
    return values.view(_INTEGERS[values.element_size()]).numpy()
