"""Boxes: rectangular parts of a tensor, and arithmetic on them. No tensors, no communication.

A box is a pair (lo, hi) of index tuples and contains the elements lo <= i < hi.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return (0,) * len(shape), tuple(shape)


def cut(shape: Sequence[int], dim: int, start: int, stop: int) -> Box:
    """Return the box of indices [start, stop) along dimension `dim`, whole in every other dimension."""
    lo, hi = list(whole(shape)[0]), list(shape)
    lo[dim], hi[dim] = start, stop
    return tuple(lo), tuple(hi)


def size(box: Box) -> int:
    """Return the number of elements."""
    return math.prod(max(b - a, 0) for a, b in zip(*box, strict=True))


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of the box."""
    return tuple(b - a for a, b in zip(*box, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection, or None if it is empty."""
    lo = tuple(map(max, a[0], b[0]))
    hi = tuple(map(min, a[1], b[1]))
    return (lo, hi) if all(x < y for x, y in zip(lo, hi, strict=True)) else None


def subtract(a: Box, b: Box) -> list[Box]:
    """Return the elements of `a` outside `b`, as disjoint boxes."""
    common = intersect(a, b)
    if common is None:
        return [a]
    rest, (lo, hi) = [], a
    for dim, (start, stop) in enumerate(zip(*common, strict=True)):
        for x, y in ((lo[dim], start), (stop, hi[dim])):
            if x < y:
                rest.append(((*lo[:dim], x, *lo[dim + 1 :]), (*hi[:dim], y, *hi[dim + 1 :])))
        lo, hi = (*lo[:dim], start, *lo[dim + 1 :]), (*hi[:dim], stop, *hi[dim + 1 :])
    return rest


def missing(box: Box, parts: Iterable[Box]) -> list[Box]:
    """Return the elements of `box` that no box of `parts` contains, as disjoint boxes; empty if the parts cover it."""
    rest = [box]
    for part in parts:
        rest = [piece for old in rest for piece in subtract(old, part)]
        if not rest:
            break
    return rest


def brackets(box: Box) -> str:
    """Return the box in Python's notation: [0:4, 8:16]."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(*box, strict=True)) + "]"
