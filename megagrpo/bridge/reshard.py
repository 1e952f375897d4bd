"""Who gives which part of a tensor to whom: pure arithmetic on boxes, no tensors, no communication.

A box is a pair (lo, hi) of index tuples and stands for the elements lo <= i < hi of one Hugging Face tensor. The trainer's ranks hold
boxes, called blocks in `blocks.py`; a worker of the engine wants boxes, which need not follow the same cuts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return (0,) * len(shape), tuple(shape)


def cut(shape: Sequence[int], dim: int, start: int, stop: int) -> Box:
    """The box of places [start, stop) of dimension `dim`, whole in every other."""
    lo, hi = list(whole(shape)[0]), list(shape)
    lo[dim], hi[dim] = start, stop
    return tuple(lo), tuple(hi)


def size(box: Box) -> int:
    """Number of elements."""
    return math.prod(max(b - a, 0) for a, b in zip(*box, strict=True))


def extent(box: Box) -> tuple[int, ...]:
    """Shape of the box."""
    return tuple(b - a for a, b in zip(*box, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """What both hold, or None."""
    lo = tuple(map(max, a[0], b[0]))
    hi = tuple(map(min, a[1], b[1]))
    return (lo, hi) if all(x < y for x, y in zip(lo, hi, strict=True)) else None


def subtract(a: Box, b: Box) -> list[Box]:
    """What `a` holds and `b` does not, as disjoint boxes."""
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
    """The elements of `box` that none of `parts` holds, as disjoint boxes; empty when the parts cover it."""
    rest = [box]
    for part in parts:
        rest = [piece for old in rest for piece in subtract(old, part)]
        if not rest:
            break
    return rest


def plan(box: Box, holders: Sequence[Box], reader: int = 0) -> list[tuple[int, Box]]:
    """Which holder gives which part of `box`, as (index into `holders`, part): each element of `box` exactly once.

    Where several hold the same elements, readers with different numbers start at different holders. Raises LookupError, with the first
    box that nobody holds, when the holders do not cover `box`.
    """
    rest, parts = [box], []
    for offset in range(len(holders)):
        index = (reader + offset) % len(holders)
        left = []
        for piece in rest:
            if (part := intersect(piece, holders[index])) is None:
                left.append(piece)
            else:
                parts.append((index, part))
                left.extend(subtract(piece, part))
        rest = left
        if not rest:
            return parts
    if size(box) == 0:
        return []
    raise LookupError(f"nobody holds {brackets(rest[0])}")


def owners(roster: Sequence[Iterable[tuple[Hashable, int]]]) -> dict[Hashable, int]:
    """One rank for each key that several ranks hold: block -> rank.

    `roster` has one list per rank, of (key, size). Larger keys go first, each to the least loaded of its holders, so replicas share the
    work; every rank that calls this with the same roster gets the same answer.
    """
    holders: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    for rank, keys in enumerate(roster):
        for key, count in keys:
            holders.setdefault(key, []).append(rank)
            sizes[key] = count
    load = [0] * len(roster)
    owner = {}
    for key in sorted(holders, key=lambda k: -sizes[k]):  # stable: ties stay in roster order
        owner[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owner[key]] += sizes[key]
    return owner


def brackets(box: Box) -> str:
    """The box as it is written in Python: [0:4, 8:16]."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(*box, strict=True)) + "]"
