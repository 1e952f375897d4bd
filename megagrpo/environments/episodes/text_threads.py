"""Threads for work on texts: one conversation's long text must not stop the event loop in which all others wait."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

INLINE_SIZE = 1 << 14  # characters that are parsed, rendered and tokenized in a few milliseconds: not worth a thread
LONG_SIZE = 1 << 18  # characters whose work takes a tenth of a second or more
_THREADS = 16
# for long texts: more threads at once than cores would make the event loop wait for its turn on a core
_LONG_THREADS = max(2, min(8, len(os.sched_getaffinity(0)) // 2))


class TextThreads:
    """Renders, tokenizes and parses long texts outside of the event loop.

    Tokenizers release the GIL. Templates hold it, but Python takes it from a thread after 5 ms. One call of `json`
    holds it to its end: `agent_messages.read_json` says what that means.
    """

    def __init__(self) -> None:
        self._threads, self._long = (ThreadPoolExecutor(count, "texts") for count in (_THREADS, _LONG_THREADS))

    async def run[T](self, size: int, work: Callable[[], T]) -> T:
        """Return `work()` on a text of `size` characters or bytes: in a thread unless the text is small. A caller that
        is cancelled does not wait for it, so `work` must change nothing that the caller shares with others."""
        if size < INLINE_SIZE:
            return work()
        threads = self._threads if size < LONG_SIZE else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)
