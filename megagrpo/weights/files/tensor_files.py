"""The safetensors format: headers are checked completely, tensors are views of the mapped file, read only on use.

Format: 8 bytes with the length of the header, the header in JSON, the bytes of the tensors
(https://huggingface.co/docs/safetensors). This module replaces the safetensors library, whose errors name neither file
nor tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
METADATA_KEY = "__metadata__"
_PREFIX = 8
LFS_POINTER = b"version "  # first bytes of the text file that git keeps in place of a large file
_RELEASE = 2**28  # bytes read from mapped files before their pages are released
COPY_AGAIN = "download or copy the file again"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in config.json and in vLLM: `float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Entry:
    """A tensor of a file; its bytes are [start, stop), counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def parse_header(text: bytes | str, path: Path) -> dict[str, Entry]:
    """Return a header's tensors in order of offset. Raises ValueError, naming `path` and tensor, if it is damaged."""
    try:
        raw = json.loads(text)
        entries = {name: _entry(name, value, path) for name, value in raw.items() if name != METADATA_KEY}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"model: {path} is corrupt: its header is not a JSON object ({error}); {COPY_AGAIN}") from None
    at, entries = 0, dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    for name, entry in entries.items():
        if entry.start != at:
            where = f"{name} starts at byte {entry.start} of the data and not at {at}"
            raise ValueError(f"model: {path} is corrupt: {where}; {COPY_AGAIN}")
        at = entry.stop
    return entries


def _entry(name: str, value: Any, path: Path) -> Entry:
    try:
        start, stop = value["data_offsets"]
        dtype, shape = value["dtype"], tuple(value["shape"])
        size = math.prod(shape) * (SAFETENSORS_DTYPES[dtype].itemsize if dtype in SAFETENSORS_DTYPES else 1)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"model: {path} is corrupt: its header describes {name} as {value}; {COPY_AGAIN}") from None
    if dtype not in SAFETENSORS_DTYPES:
        known = ", ".join(SAFETENSORS_DTYPES)
        why = f"{name} in {path} has dtype {dtype}, which is not one of {known}"
        raise ValueError(f"model: {why}; use the original weights")
    if stop - start != size or start < 0 or min(shape, default=0) < 0:
        sizes = f"{name}, {dtype} {list(shape)}, takes {size} bytes and not {stop - start}"
        raise ValueError(f"model: {path} is corrupt: {sizes}; {COPY_AGAIN}")
    return Entry(SAFETENSORS_DTYPES[dtype], shape, start, stop)


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> bytes:
    """Return the header of a file with these tensors, in this order."""
    header: dict[str, Any] = {METADATA_KEY: metadata or {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        stop = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)  # aligns the tensors, because readers map them


def read_header(path: Path) -> bytes:
    """Return the file's header. Raises ValueError when the file ends inside it, OSError when it cannot be read."""
    with open(path, "rb") as file:
        size = path.stat().st_size
        first = file.read(_PREFIX)
        length = int.from_bytes(first, "little")
        if first == LFS_POINTER:
            said = "is a git-lfs pointer, not weights; run `git lfs pull` in its folder, or download the model again"
            raise ValueError(f"model: {path} {said}")
        if size < _PREFIX or length > size - _PREFIX:
            why = f"is truncated or not a safetensors file: its {size} bytes end inside the header"
            raise ValueError(f"model: {path} {why}; {COPY_AGAIN}")
        return file.read(length)


class TensorFile:
    """One safetensors file. Construction checks its size against its header; tensors are read on use.

    Raises ValueError when the file is damaged, OSError when it cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.header = read_header(path)
        self.entries = parse_header(self.header, path)
        self._data = _PREFIX + len(self.header)
        size, needed = path.stat().st_size, self._data + max((entry.stop for entry in self.entries.values()), default=0)
        if size < needed:
            first = next(name for name, entry in self.entries.items() if self._data + entry.stop > size)
            raise ValueError(f"model: {path} is truncated inside {first}: {size} bytes of {needed}; {COPY_AGAIN}")
        if size > needed:
            raise ValueError(f"model: {path} is corrupt: {size - needed} bytes follow the last tensor; {COPY_AGAIN}")
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def tensor(self, name: str) -> Tensor:
        """Return a read-only view of the tensor in the file, in its stored shape and dtype."""
        entry = self.entries[name]
        return mapped_tensor(self._map, self._data + entry.start, entry.dtype, entry.shape)


class _Pages:
    """The mapped files whose pages count as this process's memory until released. The page cache keeps them."""

    def __init__(self) -> None:
        self._files: list[mmap.mmap] = []
        self._nbytes = 0

    def will_read(self, file: mmap.mmap, nbytes: int) -> None:
        if self._nbytes + nbytes > _RELEASE:
            for read in self._files:
                read.madvise(mmap.MADV_DONTNEED)
            self._files, self._nbytes = [], 0
        self._nbytes += nbytes
        if file not in self._files:
            self._files.append(file)


_PAGES = _Pages()


def mapped_tensor(buffer: mmap.mmap, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor [shape] of `dtype` at `offset` of a mapped file: a view, or a copy when the offset is not
    aligned to the element size."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    _PAGES.will_read(buffer, count * dtype.itemsize)
    with warnings.catch_warnings():  # "buffer is not writable"
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
    flat = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()
    return flat.view(dtype).view(shape)


def first_bad(tensor: Tensor) -> str | None:
    """Return the first NaN or infinity and its index as text, or None. `tensor` is [...] of a floating dtype."""
    if tensor.numel() == 0 or all(map(math.isfinite, torch.aminmax(tensor))):
        return None
    index = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    return f"{tensor[tuple(index)].item()} at {index}"
