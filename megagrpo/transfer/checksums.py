"""Copies with a checksum. Memory is read once: each chunk is checked while it is still in the cache."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagrpo.families.boxes import Box, extent

CHUNK = 2**18  # bytes: a quarter of a core's L2 cache
_UNSIGNED = {2: np.uint16, 4: np.uint32}
_INTEGERS = {2: torch.int16, 4: torch.int32}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}  # bit patterns; a larger one is NaN
_TOO_LARGE = 0x7F7F8000  # float32 bit pattern: bfloat16 rounds this value and larger ones to infinity


class NotFinite(ValueError):
    """A tensor holds NaN or infinity."""


class Checked(NamedTuple):
    """The result of a checked copy: the checksum of the copied elements, and the seconds spent on the checksum."""

    checksum: int
    seconds: float


def checksum(values: Tensor, column: int = 0) -> int:
    """Return the sum, modulo 2**64, of the elements read as unsigned integers of their own width.

    `values` is [...] float32, bfloat16 or float16, with any strides. Each element is shifted by its position within 8 bytes of its row, so
    a row is summed 8 bytes at a time. `column` is the index of the first element along the last dimension of the whole tensor. The
    checksums of the parts of a tensor add up to the checksum of the tensor. The checksum detects lost, zeroed, stale and flipped elements,
    and swapped neighbours. It does not detect other swaps, such as two swapped rows.
    """
    values = values.detach() if values.dim() else values.detach()[None]
    lanes = 8 // values.element_size()
    if values.is_contiguous() and not (values.shape[-1] % lanes or column % lanes or values.storage_offset() % lanes):
        words = values.view(-1).view(torch.int64)
        return int(words.numpy().sum() if words.device.type == "cpu" else words.sum()) % 2**64
    width = 8 * values.element_size()
    integers = values.view(_INTEGERS[values.element_size()]).to(torch.int64) & (2**width - 1)
    columns = range(min(lanes, values.shape[-1]))
    return sum(int(integers[..., lane::lanes].sum()) << width * ((column + lane) % lanes) for lane in columns) % 2**64


def copy_checked(target: Tensor, source: Tensor, box: Box) -> Checked:
    """Copy `source` to `target`, cast to the dtype of `target`, and return the checksum of the copy.

    `target` [...] is contiguous and holds the part `box` of a tensor in its order. `source` [...] has as many elements, in any shape that
    the order allows, and any strides. Dtypes are float32, bfloat16 or float16, and may differ. The copy is complete when this function
    returns, on a GPU too.
    """
    shape = extent(box) or (1,)
    column = box[0][-1] if box[0] else 0
    if target.device.type != "cpu":
        target.view(source.shape).copy_(source)
        started = time.perf_counter()
        return Checked(checksum(target.view(shape), column), time.perf_counter() - started)
    lanes = 8 // target.element_size()
    whole_words = not (shape[-1] % lanes or column % lanes or target.storage_offset() % lanes)
    flat = target.view(-1)
    bits, same_format = _bits(flat), target.dtype == source.dtype and source.device.type == "cpu"
    words = bits.view(np.int64) if whole_words else None
    total, at, seconds, limit = 0, 0, 0.0, CHUNK // target.element_size()
    pieces: Iterator[Tensor] | Iterator[np.ndarray] = _pieces(_bits(source), limit) if same_format else _pieces(source, limit)
    for piece in pieces:
        count = math.prod(piece.shape)
        if isinstance(piece, np.ndarray):  # NumPy copies on this thread: a chunk is done before a thread of a pool would wake up
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


def check_finite(values: Tensor, dtype: torch.dtype) -> None:
    """Raises NotFinite when a value is NaN or infinite, or becomes infinite when cast to `dtype`.

    `values` is [...] float32, bfloat16 or float16, with any strides. On a GPU the cast is not checked.
    """
    if values.device.type != "cpu":
        if values.numel() and not all(map(torch.isfinite, values.aminmax())):  # aminmax returns NaN if any value is NaN
            raise NotFinite
        return
    limit = _TOO_LARGE if (values.dtype, dtype) == (torch.float32, torch.bfloat16) else _INFINITY[values.dtype]
    for piece in _pieces(_bits(values), CHUNK // values.element_size()):
        _check_below(piece, limit)


def _pieces[T: (Tensor, np.ndarray)](source: T, limit: int) -> Iterator[T]:
    """Yield parts of `source` [...] with at most `limit` elements each, in element order. Each part is a range of one dimension and whole
    in all later dimensions."""
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


def _check_below(bits: np.ndarray, limit: int) -> None:
    """Raises NotFinite when the magnitude of an element of `bits` [...] is `limit` or above, as for infinity and NaN.

    As signed integers the positive elements are the largest. As unsigned integers the negative elements are the largest.
    """
    negative = limit + 2 ** (8 * bits.itemsize - 1)
    if bits.size and (bits.max() >= limit or bits.view(_UNSIGNED[bits.itemsize]).max() >= negative):
        raise NotFinite


def _bits(values: Tensor) -> np.ndarray:
    """Return the elements of `values` [...] as integers of their own width, same shape and strides, because NumPy has no bfloat16."""
    return values.view(_INTEGERS[values.element_size()]).numpy()
