"""Ctrl-C and SIGTERM of a training run: the first signal asks the run to save and stop, a second Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

FORCE_SECONDS = 20.0  # after the second Ctrl-C; stopping vLLM servers takes up to 15 s of this time


def stop_on_signals(stop: Callable[[int], None]) -> None:
    """Install handlers that call `stop(number)` at the first SIGINT or SIGTERM. A second SIGINT raises
    KeyboardInterrupt in the main thread.

    A process that has not ended `FORCE_SECONDS` after the second SIGINT exits with code 130. A separate thread enforces
    this: Python runs signal handlers only in the main thread, and not while that thread waits inside a library. Call
    this from the main thread.
    """
    signals: list[int] = []

    def ask(number: int, frame: object) -> None:
        signals.append(number)
        if number != signal.SIGINT or len(signals) == 1:
            stop(number)
            return
        try:
            # KeyboardInterrupt inside an event loop's own code can lose a wake-up; asyncio.run would then wait forever.
            asyncio.get_running_loop().call_soon_threadsafe(_interrupt)
        except RuntimeError:  # no event loop runs in the main thread
            _interrupt()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # writes the number of each signal to the pipe at once
    threading.Thread(target=_end_after_two, args=(reader,), name="second-ctrl-c", daemon=True).start()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _end_after_two(reader: int) -> None:
    seen = b""
    while signal.SIGINT not in seen[1:]:
        seen += os.read(reader, 64)
    time.sleep(FORCE_SECONDS)
    os._exit(128 + signal.SIGINT)
