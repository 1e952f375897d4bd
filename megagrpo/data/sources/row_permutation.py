"""A random order of very many rows, of which no list is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import overload

ROUNDS = 6


class RowPermutation(Sequence[int]):
    """`rows` in an order that depends on `key` alone; each element is computed when it is asked for.

    A Feistel network permutes the numbers of 2 x `half` bits (Luby and Rackoff 1988). A number beyond the rows is
    permuted again, until it is one of theirs: at most four times on average.

    >>> sorted(RowPermutation(range(10), "seed 0")) == list(range(10))
    True
    """

    def __init__(self, rows: Sequence[int], key: str):
        self._rows, self._key = rows, key
        self._half = max(1, (max(1, len(rows) - 1).bit_length() + 1) // 2)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        while (place := self._permuted(place)) >= len(self):
            pass
        return self._rows[place]

    def _permuted(self, number: int) -> int:
        mask = (1 << self._half) - 1
        left, right = number >> self._half, number & mask
        for i in range(ROUNDS):
            digest = blake2b(f"{self._key}/{i}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        return left << self._half | right
