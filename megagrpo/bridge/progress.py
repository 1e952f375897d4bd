"""Progress of a long copy: one line that is rewritten on a terminal, or a new line every 10 s elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from megagrpo.process.terminal import show

_EVERY = {True: 0.2, False: 10.0}  # seconds between two lines: on a terminal (True), elsewhere (False)


class Progress:
    """Counts bytes up to `total`; only a process with `here` shows them. A context manager: on exit it shows the final state."""

    def __init__(self, title: str, total: int, here: bool = True, done: int = 0, stream: TextIO | None = None):
        self._title, self._total, self._here, self._done, self._before = title, total, here, done, done
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> Progress:
        if self._here and self._before:
            show(f"{self._title}: resuming after {_size(self._before)} of {_size(self._total)}", self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._show("\n" if kind is None or self._terminal else None)

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more as done."""
        self._done += nbytes
        if self._done < self._total and time.monotonic() - self._shown >= _EVERY[self._terminal]:
            self._show("" if self._terminal else "\n")

    def _show(self, end: str | None) -> None:
        if not self._here or end is None:
            return
        self._shown = time.monotonic()
        seconds = self._shown - self._start
        speed = (self._done - self._before) / max(seconds, 1e-9)
        left = "" if self._done >= self._total else f", {(self._total - self._done) / max(speed, 1):.0f} s left"
        share = self._done / self._total if self._total else 1.0
        line = f"{self._title}: {share:4.0%} of {_size(self._total)}, {_size(speed)}/s, {seconds:.0f} s{left}"
        print("\r" + line.ljust(79) if self._terminal else line, end=end, file=self._stream, flush=True)


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"
