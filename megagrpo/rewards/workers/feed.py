"""A queue that feeds calls to a running worker pool: any thread puts items in, and the pool's thread polls a connection
for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from typing import Any


class FeedEnded(Exception):
    """The feed has ended: no more items follow, and calls in progress must be dropped."""


class Feed:
    """The queue. `put` and `end` are thread-safe; the pool's thread calls `take` when `connection` is readable.
    `expand` turns an item into calls in that thread."""

    def __init__(self, expand: Callable[[Any], Iterable[Any]]):
        self._expand = expand
        self._items: deque[Any] = deque()
        self.connection, self._wake = Pipe(duplex=False)
        self._ended = False

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake.send_bytes(b"+")

    def end(self) -> None:
        """End the feed: the next `take` raises FeedEnded, so the pool drops its calls."""
        self._ended = True
        self._wake.send_bytes(b".")

    def take(self) -> list[Any]:
        """Return the calls of all items since the last call. Raises FeedEnded after `end`."""
        while self.connection.poll():
            self.connection.recv_bytes()
        if self._ended:
            raise FeedEnded
        calls: list[Any] = []
        while self._items:
            calls += self._expand(self._items.popleft())
        return calls

    def close(self) -> None:
        self.connection.close()
        self._wake.close()
