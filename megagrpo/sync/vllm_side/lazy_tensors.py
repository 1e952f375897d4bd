"""Lazy tensors: a model's own weight loaders run over tensors without data, which record the slices they copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megagrpo.families.shared.boxes import Box, whole

aten = torch.ops.aten


class Source(Protocol):
    """The provider of a lazy tensor's elements; it is notified of each copy."""

    def announce(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Notify that a loader copies the meta tensor `view` [...] in `name` to `destination` [...], maybe meta too."""

    def arrive(self, destination: Tensor) -> None:
        """Notify that a loader fills `destination` [...] with values that come from no lazy tensor."""

    def fetch(self, name: str, view: Tensor) -> Tensor:
        """Return the elements of the meta tensor `view` [...], in its shape and dtype."""

    def fill(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Copy the elements of the meta tensor `view` [...] to `destination` [...], like `destination.copy_`."""


class LazyTensor(Tensor):
    """A Hugging Face tensor without data, of any shape and dtype.

    View operations, `clone`, `contiguous` and `zeros_like` return lazy tensors. Each `copy_` from one is announced to
    its source. If the destination has data, only this view is fetched. Any other operation fetches the elements and
    computes. Raises NotImplementedError for an operation whose change to the tensor would be lost.

    A reshape may merge the first dimensions of a view whose rows are permuted (Llama 4's queries and keys). `view_`
    then has more dimensions than this tensor, and copies go to the destination in the shape of `view_`.
    """

    view_: Tensor  # a meta tensor inside tensor `name_`, with the same elements in the same order
    name_: str
    source: Source

    @staticmethod
    def __new__(cls, view: Tensor, name: str, source: Source, rows: int | None = None) -> LazyTensor:
        merged = view if rows is None else torch.empty((rows, view.shape[-1]), dtype=view.dtype, device="meta")
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            merged.shape,
            strides=merged.stride(),
            storage_offset=merged.storage_offset(),
            dtype=view.dtype,
            device=torch.device("cpu"),
        )
        self.view_, self.name_, self.source = view, name, source
        return self

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype, source: Source) -> LazyTensor:
        """Return a lazy tensor for the whole tensor `name`, of the given shape and dtype."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), name, source)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func is aten.copy_.default and not isinstance(first, LazyTensor):
            lazy = args[1]
            first = lazy.in_view_shape(first)
            lazy.source.announce(lazy.name_, lazy.view_, first)
            if first.is_meta:
                first.copy_(lazy.view_)
            else:
                lazy.source.fill(lazy.name_, lazy.view_, first)
            return args[0]
        if isinstance(first, LazyTensor) and func._schema.is_mutable:
            raise NotImplementedError(f"{first.name_}: a weight loader modifies its input tensor ({func})")
        if isinstance(first, LazyTensor) and func is aten.clone.default:  # `contiguous` calls clone too
            return LazyTensor(first.view_, first.name_, first.source, first._rows)
        if isinstance(first, LazyTensor) and func is aten.zeros_like.default:
            return LazyTensor(first.view_, first.name_, _Zeros(first.source), first._rows)
        if isinstance(first, LazyTensor) and (merged := first._merged(func, args[1:])) is not None:
            return merged
        if isinstance(first, LazyTensor) and not first.is_merged and (func.is_view or func is aten.detach.default):
            views = func(first.view_, *args[1:], **kwargs)
            wrap: Callable[[Tensor], LazyTensor] = lambda view: LazyTensor(view, first.name_, first.source)  # noqa: E731
            return [wrap(view) for view in views] if isinstance(views, (list, tuple)) else wrap(views)
        fetch: Callable[[Any], Any] = lambda x: x.fetch() if isinstance(x, LazyTensor) else x  # noqa: E731
        return func(*map(fetch, args), **{key: fetch(value) for key, value in kwargs.items()})

    @property
    def is_merged(self) -> bool:
        """Whether this tensor's rows are the first dimensions of `view_`."""
        return self.dim() != self.view_.dim()

    @property
    def _rows(self) -> int | None:
        return self.shape[0] if self.is_merged else None

    def in_view_shape(self, destination: Tensor) -> Tensor:
        """Return `destination`, which has this tensor's shape, as a view in the shape of `view_`."""
        return destination.view(self.view_.shape) if self.is_merged else destination

    def _merged(self, func: Any, rest: tuple[Any, ...]) -> LazyTensor | None:
        """Return the result of `func` if it merges a view's dimensions into rows, or cuts merged rows at whole groups.

        A group is all rows of one index of the view's first dimension. None: `func` does neither.
        """
        view = self.view_
        if func is aten._unsafe_view.default and not self.is_merged:
            if view.dim() > 2 and list(rest[0]) == [view.shape[:-1].numel(), view.shape[-1]]:
                return LazyTensor(view, self.name_, self.source, rest[0][0])
        if func is aten.slice.Tensor and self.is_merged:
            start, end, step = slice(*rest[1:4]).indices(self.shape[0]) if len(rest) > 2 else (0, 0, 0)
            group = self.shape[0] // view.shape[0]
            if rest[0] == 0 and step == 1 and start % group == end % group == 0:
                return LazyTensor(view[start // group : end // group], self.name_, self.source, end - start)
        return None

    def fetch(self) -> Tensor:
        """Return the elements, in the shape and dtype of this tensor."""
        return self.source.fetch(self.name_, self.view_).reshape(self.shape)


@dataclass(frozen=True)
class _Zeros:
    """The source of a tensor that a loader fills with zeros, in place of slices that go to another worker."""

    source: Source

    def announce(self, name: str, view: Tensor, destination: Tensor) -> None:
        self.source.arrive(destination)

    def arrive(self, destination: Tensor) -> None:
        self.source.arrive(destination)

    def fetch(self, name: str, view: Tensor) -> Tensor:
        return torch.zeros(view.shape, dtype=view.dtype)

    def fill(self, name: str, view: Tensor, destination: Tensor) -> None:
        destination.zero_()


def box_of(view: Tensor, shape: Sequence[int]) -> tuple[Box, list[int] | None]:
    """Return the smallest box of a contiguous tensor of `shape` that holds `view`, and the view's strides in that box.

    `view` is a meta tensor of any shape and dtype. When its dimensions do not follow the tensor's own, as for a
    flattened view, this function returns the whole tensor and None: use the view's own strides.
    """
    base = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    lo, offset = [], view.storage_offset()
    for stride in base:
        lo.append(offset // stride)
        offset %= stride
    extent, steps = [1] * len(shape), []
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            steps.append((0, 0))
            continue
        dim = next((dim for dim, unit in enumerate(base) if stride and stride % unit == 0), None)
        if dim is None:
            return whole(shape), None
        extent[dim] += (length - 1) * (stride // base[dim])
        steps.append((dim, stride // base[dim]))
    if any(start + length > total for start, length, total in zip(lo, extent, shape, strict=True)):
        return whole(shape), None
    inner = [math.prod(extent[dim + 1 :]) for dim in range(len(extent))]
    return (tuple(lo), tuple(a + b for a, b in zip(lo, extent, strict=True))), [
        step * inner[dim] for dim, step in steps
    ]


def restride(values: Tensor, view: Tensor, strides: list[int] | None) -> Tensor:
    """Return the elements in the shape and order of the meta tensor `view` [...].

    `values` holds the elements of the box, contiguous, in its shape and any dtype. Box and `strides` are from `box_of`.
    """
    if strides is None:
        return values.as_strided(view.shape, view.stride(), view.storage_offset())
    return values.as_strided(view.shape, strides)
