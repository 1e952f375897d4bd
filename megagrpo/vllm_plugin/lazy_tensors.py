"""Tensors that are not there yet: a model's own weight loaders run over them and thereby say which slices they copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megagrpo.families.boxes import Box, whole

aten = torch.ops.aten


class Source(Protocol):
    """Where the elements come from, and who hears of each copy."""

    def announce(self, name: str, view: Tensor, destination: Tensor) -> None:
        """A loader copies `view`, a meta tensor inside tensor `name`, to `destination`, which may be a meta tensor too."""

    def arrive(self, destination: Tensor) -> None:
        """A loader fills `destination` with something else in place of what is there."""

    def fetch(self, name: str, view: Tensor) -> Tensor:
        """The elements of the meta tensor `view`, in its shape."""

    def fill(self, name: str, view: Tensor, destination: Tensor) -> None:
        """Copy the elements of `view` to `destination`, as `destination.copy_` would."""


class LazyTensor(Tensor):
    """A Hugging Face tensor without data. Views move a meta tensor, `copy_` takes just that view, anything else fetches and computes.
    NotImplementedError for what would change the tensor: nobody would hear of it."""

    @staticmethod
    def __new__(cls, view: Tensor, name: str, source: Source) -> LazyTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, strides=view.stride(), storage_offset=view.storage_offset(), dtype=view.dtype, device="cpu"
        )
        self.view_, self.name_, self.source = view, name, source
        return self

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype, source: Source) -> LazyTensor:
        """The whole tensor `name`."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), name, source)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is aten.copy_.default and not isinstance(first, LazyTensor):
            lazy = args[1]
            lazy.source.announce(lazy.name_, lazy.view_, first)
            if first.is_meta:
                return first.copy_(lazy.view_)
            lazy.source.fill(lazy.name_, lazy.view_, first)
            return first
        if isinstance(first, LazyTensor) and func._schema.is_mutable:
            raise NotImplementedError(f"{first.name_}: a weight loader changes the tensor that it is given ({func})")
        if isinstance(first, LazyTensor) and func is aten.clone.default:  # also what makes it contiguous
            return LazyTensor(first.view_, first.name_, first.source)
        if isinstance(first, LazyTensor) and func is aten.zeros_like.default:
            return LazyTensor(first.view_, first.name_, _Zeros(first.source))
        if isinstance(first, LazyTensor) and (func.is_view or func is aten.detach.default):
            moved = func(first.view_, *args[1:], **kwargs)
            wrap = lambda view: LazyTensor(view, first.name_, first.source)  # noqa: E731
            return [wrap(view) for view in moved] if isinstance(moved, (list, tuple)) else wrap(moved)
        real = lambda x: x.fetch() if isinstance(x, LazyTensor) else x  # noqa: E731
        return func(*map(real, args), **{key: real(value) for key, value in kwargs.items()})

    def fetch(self) -> Tensor:
        """The elements themselves."""
        return self.source.fetch(self.name_, self.view_)


@dataclass(frozen=True)
class _Zeros:
    """The source of a tensor that a loader fills with zeros: what goes to another worker in its place."""

    source: Source

    def announce(self, name: str, view: Tensor, destination: Tensor) -> None:
        self.source.arrive(destination)

    def fetch(self, name: str, view: Tensor) -> Tensor:
        return torch.zeros(view.shape, dtype=view.dtype)

    def fill(self, name: str, view: Tensor, destination: Tensor) -> None:
        destination.zero_()


def box_of(view: Tensor, shape: Sequence[int]) -> tuple[Box, list[int] | None]:
    """The smallest box of a contiguous tensor of `shape` that holds `view`, and the strides of the view inside that box.

    A view whose dimensions do not follow the tensor's own (a flattened one, say) gets the whole tensor and None: use its own strides.
    """
    base = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    lo, rest = [], view.storage_offset()
    for stride in base:
        lo.append(rest // stride)
        rest %= stride
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
    return (tuple(lo), tuple(a + b for a, b in zip(lo, extent, strict=True))), [step * inner[dim] for dim, step in steps]


def restride(values: Tensor, view: Tensor, strides: list[int] | None) -> Tensor:
    """The contiguous elements of the box that `box_of` gave, seen in the shape and order of `view`."""
    if strides is None:
        return values.as_strided(view.shape, view.stride(), view.storage_offset())
    return values.as_strided(view.shape, strides)
