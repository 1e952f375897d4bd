"""Threads for work on texts: one conversation's long text must not stop the event loop in which all others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

INLINE_SIZE = 1 << 14  # characters that are parsed, rendered and tokenized in a few milliseconds: not worth a thread
_THREADS = 16


class TextThreads:
    """Renders, tokenizes and parses long texts outside of the event loop.

    Tokenizers release the GIL. Templates and JSON hold it, but Python takes it from a thread after 5 ms.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "texts")

    async def run[T](self, size: int, work: Callable[[], T]) -> T:
        """Return `work()` on a text of `size` characters or bytes: in a thread unless the text is small. A caller that
        is cancelled does not wait for it, so `work` must change nothing that the caller shares with others."""
        if size < INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
