"""Who gives which part of a tensor to whom: pure arithmetic on boxes, no tensors, no communication.

The trainer's ranks hold boxes of Hugging Face tensors, called blocks in `families/blocks.py`; a worker of the engine wants boxes, which
need not follow the same cuts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from megagrpo.families.boxes import Box, brackets, intersect, size, subtract


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
