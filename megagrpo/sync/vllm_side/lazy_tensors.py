"""Lazy tensors: a model's own weight loaders run over tensors without data, which record the slices they copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megagrpo.models.families.boxes import Box, whole

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
    """

    view_: Tensor  # a meta tensor inside tensor `name_`
    name_: str
    source: Source

    @staticmethod
    def __new__(cls, view: Tensor, name: str, source: Source) -> LazyTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
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
            lazy.source.announce(lazy.name_, lazy.view_, first)
            if first.is_meta:
                return first.copy_(lazy.view_)
            lazy.source.fill(lazy.name_, lazy.view_, first)
            return first
        if isinstance(first, LazyTensor) and func._schema.is_mutable:
            raise NotImplementedError(f"{first.name_}: a weight loader modifies its input tensor ({func})")
        if isinstance(first, LazyTensor) and func is aten.clone.default:  # `contiguous` calls clone too
            return LazyTensor(first.view_, first.name_, first.source)
        if isinstance(first, LazyTensor) and func is aten.zeros_like.default:
            return LazyTensor(first.view_, first.name_, _Zeros(first.source))
        if isinstance(first, LazyTensor) and (func.is_view or func is aten.detach.default):
            views = func(first.view_, *args[1:], **kwargs)
            wrap: Callable[[Tensor], LazyTensor] = lambda view: LazyTensor(view, first.name_, first.source)  # noqa: E731
            return [wrap(view) for view in views] if isinstance(views, (list, tuple)) else wrap(views)
        fetch: Callable[[Any], Any] = lambda x: x.fetch() if isinstance(x, LazyTensor) else x  # noqa: E731
        return func(*map(fetch, args), **{key: fetch(value) for key, value in kwargs.items()})

    def fetch(self) -> Tensor:
        """Return the elements, in the shape and dtype of this view."""
        return self.source.fetch(self.name_, self.view_)


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
