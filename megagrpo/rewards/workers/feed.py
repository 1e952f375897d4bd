"""Work that arrives while other work is done: put in by some threads, taken out by another that sleeps on a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from typing import Any


class Ended(Exception):
    """No more work will come, and what is under way is to be dropped."""


class Feed:
    """`put` and `end` from any thread; `take` from the one that works, when `connection` is readable. `expand` turns an item into calls
    there."""

    def __init__(self, expand: Callable[[Any], Iterable[Any]]):
        self._expand = expand
        self._items: deque[Any] = deque()
        self.connection, self._wake = Pipe(duplex=False)
        self._ended = False

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake.send_bytes(b"+")

    def end(self) -> None:
        """Have the other side drop what it has."""
        self._ended = True
        self._wake.send_bytes(b".")

    def take(self) -> list[Any]:
        """Calls of what has been put in since the last time. Raises Ended after `end`."""
        while self.connection.poll():
            self.connection.recv_bytes()
        if self._ended:
            raise Ended
        calls = []
        while self._items:
            calls += self._expand(self._items.popleft())
        return calls

    def close(self) -> None:
        self.connection.close()
        self._wake.close()
