"""Which rank sends which part of a tensor to which reader: arithmetic on boxes, no tensors, no communication.

The trainer's ranks hold boxes of Hugging Face tensors, called blocks in `families/shared/blocks.py`. A worker of
the engine wants boxes that may be cut elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from megagrpo.families.shared.boxes import Box, brackets, intersect, size, subtract


def cover(box: Box, holders: Sequence[Box], reader: int = 0) -> list[tuple[int, Box]]:
    """Return which holder sends which part of `box`, as (index into `holders`, part). Each element occurs just once.

    Where several holders hold the same elements, readers with different numbers start at different holders. Raises
    LookupError, with the first uncovered box, when the holders do not cover `box`.
    """
    uncovered: list[Box] = [box]
    parts: list[tuple[int, Box]] = []
    for offset in range(len(holders)):
        index = (reader + offset) % len(holders)
        remaining: list[Box] = []
        for piece in uncovered:
            if (part := intersect(piece, holders[index])) is None:
                remaining.append(piece)
            else:
                parts.append((index, part))
                remaining.extend(subtract(piece, part))
        uncovered = remaining
        if not uncovered:
            return parts
    if size(box) == 0:
        return []
    raise LookupError(f"no rank holds {brackets(uncovered[0])}")


def owners(keys_of: Sequence[Iterable[tuple[Hashable, int]]]) -> dict[Hashable, int]:
    """Choose one rank for each key that several ranks hold: key -> rank.

    `keys_of` has one list of (key, size) per rank. Larger keys are assigned first, each to the least loaded of its
    holders, so replicas share the work. Every rank that calls this with the same `keys_of` gets the same result.
    """
    holders: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    for rank, keys in enumerate(keys_of):
        for key, count in keys:
            holders.setdefault(key, []).append(rank)
            sizes[key] = count
    load = [0] * len(keys_of)
    owner = {}
    for key in sorted(holders, key=lambda k: -sizes[k]):  # stable: ties stay in the order of `keys_of`
        owner[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owner[key]] += sizes[key]
    return owner
