"""This process's consoles. Lines and progress bars share one when both go to a terminal, so bars never break a line."""

from __future__ import annotations

import functools
import sys
from typing import IO, Any

from rich.console import Console

from megagrpo.platform.process.variables import ENVIRONMENT


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Re-raise the BrokenPipeError being handled. rich would exit, so closing a pager would end the training."""
        raise


@functools.cache
def _console_on(stream: IO[str]) -> Console:
    return _Console(file=stream, highlight=False)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether bars can be drawn on the stream. FORCE_COLOR adds colours to a pipe, but never bars."""
    return (
        stream is not None
        and not stream.closed
        and stream.isatty()
        and ENVIRONMENT.get("TERM", "") not in ("dumb", "unknown")
    )


def bars_console() -> Console | None:
    """Return the console of standard error, on which bars are drawn; None when it is not a terminal."""
    stream = _unwrapped(sys.stderr)
    return _console_on(stream) if is_terminal(stream) else None


def lines_console() -> Console:
    """Return the console of lines on standard output. It is the console of the bars when both streams are terminals."""
    stream = _unwrapped(sys.stdout)
    return (bars_console() if is_terminal(stream) else None) or _Console(file=stream, highlight=False)


def _unwrapped(stream: Any) -> IO[str]:
    """Return the stream that rich replaces while bars are drawn."""
    return getattr(stream, "rich_proxied_file", stream)
