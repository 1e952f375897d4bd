"""Forwards a worker's output to standard error: control characters are escaped, and excessive output is dropped."""

from __future__ import annotations

import codecs
import os
import sys
import time
from contextlib import suppress

from megagrpo.platform.process.terminal import printable

BURST = 1 << 18  # bytes that a worker may print at once
PER_SECOND = 1 << 10  # bytes per second by which the allowance grows back
_AT_ONCE = 1 << 16
_LOOKS = 64  # reads from a closed pipe; a pipe holds at most a MiB


class Output:
    """The pipe for a worker's standard output and error. The trainer forwards it whenever it waits for workers."""

    def __init__(self, name: str):
        self._name = name
        self._reads, self.writes = os.pipe()
        os.set_blocking(self._reads, False)
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._allowance, self._last, self._was_cut = float(BURST), time.monotonic(), False
        self.ended = False  # True when no more output can come

    def fileno(self) -> int:
        return self._reads

    def forward(self) -> bool:
        """Print the output so far, up to the allowance. Returns whether there was any."""
        try:
            read = b"" if self.ended else os.read(self._reads, _AT_ONCE)
        except BlockingIOError:
            return False
        self.ended = not read
        now = time.monotonic()
        self._allowance = min(float(BURST), self._allowance + PER_SECOND * (now - self._last))
        self._last = now
        allowed = read[: int(self._allowance)]
        self._allowance -= len(allowed)
        text = printable(self._text.decode(allowed))
        if len(allowed) < len(read) and not self._was_cut:
            self._was_cut = True
            text += (
                f"\n[{self._name} has printed {BURST >> 10} KiB; output above {PER_SECOND} bytes per second is "
                f"dropped from now on]\n"
            )
        with suppress(OSError, ValueError):  # standard error is closed
            sys.stderr.write(text)
            sys.stderr.flush()
        return bool(read)

    def close(self) -> None:
        """Print the remaining output of a worker that has ended, and close the pipe."""
        for _ in range(_LOOKS):
            if not self.forward():
                break
        os.close(self._reads)
