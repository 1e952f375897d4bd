"""A tensor of the model that is computed from tensors of the files, box by box, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Get = Callable[[str], Tensor]  # name of a tensor in the files -> the tensor, a view of its file
Slices = tuple[slice, ...]
Stored = Mapping[str, tuple[int, ...]]  # shapes of the tensors in the files, by name
_CHUNK = 2**22  # elements computed at once


@dataclass(frozen=True)
class View:
    """A tensor [shape] of the model. `dtype` None means that of the first part.

    `parts` names the tensors of the files that hold it, the one that places it in a file first. `read(get, slices)`
    computes the box `slices`.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    read: Callable[[Get, Slices], Tensor]

    def whole(self, get: Get) -> Tensor:
        """Return the tensor [shape]."""
        return self.read(get, tuple(slice(0, n) for n in self.shape))


@dataclass(frozen=True)
class Scaled:
    """Rows and columns of a box of a scaled matrix, and what computes it: (codes - zero points) * scales in `math`.

    `codes(rows)` returns the codes [rows, columns] of `rows`, counted from the box's first. `scales` and `zeros` are
    [row groups, column groups]; `row_groups` and `column_groups` have the group of every row and column of the box.
    """

    codes: Callable[[slice], Tensor]
    scales: Tensor
    row_groups: Tensor
    column_groups: Tensor
    math: torch.dtype
    zeros: Tensor | None = None

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Return the box [rows, columns], rounded once to `math` per operation, then to `dtype`."""
        rows, columns = len(self.row_groups), len(self.column_groups)
        out = torch.empty(rows, columns, dtype=dtype)
        for part in row_chunks(rows, columns):
            value = self.codes(part).to(self.math)
            if self.zeros is not None:
                value = value - self._spread(self.zeros, part)
            out[part] = value * self._spread(self.scales, part)
        return out

    def _spread(self, table: Tensor, rows: slice) -> Tensor:
        return table.to(self.math)[self.row_groups[rows]][:, self.column_groups]


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield the rows of a box, a bounded number of elements at a time."""
    step = max(1, _CHUNK // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def groups(part: slice, size: int) -> Tensor:
    """Return the group of each index in `part`, for groups of `size`."""
    return torch.arange(part.start, part.stop) // size
