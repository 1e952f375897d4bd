"""Work that arrives while other work is done: put in by one thread, taken out by another that sleeps on a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from typing import Any


class Aborted(Exception):
    """The work was given up; what is under way is to be dropped."""


class Feed:
    """`put` and `end` from one thread; `take` from the other, when `connection` is readable. `expand` turns an item into calls there."""

    def __init__(self, expand: Callable[[Any], Iterable[Any]]):
        self._expand = expand
        self._items: deque[Any] = deque()
        self.connection, self._wake = Pipe(duplex=False)
        self.ended = False  # nothing more will come
        self._ending = self._aborted = False

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake.send_bytes(b"+")

    def end(self, abort: bool = False) -> None:
        """Nothing more will be put in; with `abort` the other side drops what it has."""
        self._aborted |= abort
        self._ending = True
        self._wake.send_bytes(b".")

    def take(self) -> list[Any]:
        """Calls of what has been put in since the last time. Raises Aborted after an `end` that aborts."""
        while self.connection.poll():
            self.connection.recv_bytes()
        ending = self._ending  # looked at before the items, which are all there by then
        if self._aborted:
            raise Aborted
        calls = []
        while self._items:
            calls += self._expand(self._items.popleft())
        self.ended = ending
        return calls

    def close(self) -> None:
        self.connection.close()
        self._wake.close()
