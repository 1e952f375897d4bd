"""Copies that are checked while they are made: memory is read once, and the checks run on what the cache still holds."""

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

CHUNK = 2**18  # bytes: a quarter of a core's second-level cache
_UNSIGNED = {2: np.uint16, 4: np.uint32}
_INTEGERS = {2: torch.int16, 4: torch.int32}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}  # as bits; larger ones are NaN
_TOO_LARGE = 0x7F7F8000  # as bits in float32: bfloat16 rounds this and what is larger to infinity


class NotFinite(ValueError):
    """Among the values is a NaN or an infinity."""


class Checked(NamedTuple):
    """A copy that was checked: the checksum of what it holds, and the seconds that the checks took."""

    checksum: int
    seconds: float


def checksum(values: Tensor, column: int = 0) -> int:
    """Sum, modulo 2**64, of the elements seen as unsigned integers of their own width, each shifted by its place within 8 bytes of its row:
    so rows add up 8 bytes at a time.

    `values` may have any strides; `column` is the place of its first element along the last dimension of the whole tensor. The sums of the
    parts of a tensor add up to that of the tensor. The checksum tells lost, zeroed, stale and flipped elements and neighbours that traded
    places; it does not tell others that did, as two rows.
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
    """Copy `source` to `target`, which is contiguous and holds the part `box` of a tensor in its order. Casts where the dtypes differ. On a
    GPU, too, the copy is done when this returns."""
    shape = extent(box) or (1,)
    column = box[0][-1] if box[0] else 0
    if target.device.type != "cpu":
        target.view(source.shape).copy_(source)
        started = time.perf_counter()
        return Checked(checksum(target.view(shape), column), time.perf_counter() - started)
    lanes = 8 // target.element_size()
    whole_words = not (shape[-1] % lanes or column % lanes or target.storage_offset() % lanes)
    flat = target.view(-1)
    bits, plain = _bits(flat), target.dtype == source.dtype and source.device.type == "cpu"
    words = bits.view(np.int64) if whole_words else None
    total, at, seconds = 0, 0, 0.0
    for piece in _pieces(_bits(source) if plain else source, CHUNK // target.element_size()):
        count = math.prod(piece.shape)
        if plain:  # NumPy starts no threads: a chunk is done before one has woken up
            np.copyto(bits[at : at + count].reshape(piece.shape), piece)
        else:
            flat[at : at + count].view(piece.shape).copy_(piece)
        started = time.perf_counter()
        if whole_words:
            total += int(np.add.reduce(words[at // lanes : (at + count) // lanes]))
        seconds += time.perf_counter() - started
        at += count
    if whole_words:
        return Checked(total % 2**64, seconds)
    started = time.perf_counter()
    return Checked(checksum(target.view(shape), column), seconds + time.perf_counter() - started)


def check_finite(values: Tensor, dtype: torch.dtype) -> None:
    """NotFinite when one of the values, of any strides, is NaN or infinite, or is so once it is cast to `dtype`."""
    if values.device.type != "cpu":
        if values.numel() and not all(map(torch.isfinite, values.aminmax())):  # NaN wins over every other value
            raise NotFinite
        return
    limit = _TOO_LARGE if (values.dtype, dtype) == (torch.float32, torch.bfloat16) else _INFINITY[values.dtype]
    for piece in _pieces(_bits(values), CHUNK // values.element_size()):
        _check_below(piece, limit)


def _pieces(source: Tensor | np.ndarray, limit: int) -> Iterator[Tensor | np.ndarray]:
    """Parts of `source` of at most `limit` elements, in the order of its elements: a range of one dimension, whole in all after it."""
    shape = source.shape
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dim = next((dim for dim, count in enumerate(inner) if count <= limit), len(shape))
    if dim == len(shape):
        yield source  # a single element, or none
        return
    step = max(1, limit // max(1, inner[dim]))
    for outer in itertools.product(*map(range, shape[:dim])):
        row = source[outer]
        for start in range(0, shape[dim], step):
            yield row[start : start + step]


def _check_below(bits: np.ndarray, limit: int) -> None:
    """NotFinite when an element's magnitude is `limit` or above, as that of infinity and NaN is: as signed integers positive ones come
    last, as unsigned ones negative ones do."""
    negative = limit + 2 ** (8 * bits.itemsize - 1)
    if bits.size and (bits.max() >= limit or bits.view(_UNSIGNED[bits.itemsize]).max() >= negative):
        raise NotFinite


def _bits(values: Tensor) -> np.ndarray:
    """The elements as integers of their own width, any strides: NumPy knows no bfloat16."""
    return values.view(_INTEGERS[values.element_size()]).numpy()
