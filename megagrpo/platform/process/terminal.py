"""Text of models, users and other programs on the terminal: control characters are escaped and cannot control it.

Escape sequences set titles and the clipboard, hide text or answer as if typed; bidirectional overrides disguise text.
All code that prints text from outside this package uses this module. Files of a run keep the text unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import IO

from megagrpo.platform.process.variables import ENVIRONMENT

# C0 but tab and newline, DEL, C1, the marks and overrides of bidirectional text, line separators, surrogates, tags.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)

WIDTH = 100  # columns of a line
LEVELS = ("debug", "info", "warning", "error")
LEVEL_VARIABLE = "MEGAGRPO_LOG_LEVEL"


class LogLevelError(ValueError):
    """`MEGAGRPO_LOG_LEVEL` is not a log level."""


class OutputError(Exception):
    """Standard output cannot be written: its reader has closed the pipe, or its disk is full."""

    def __init__(self, error: OSError):
        super().__init__(
            f"megagrpo: standard output cannot be written: {error.strerror}; free space there, or write to another "
            "place"
        )
        self.is_closed_pipe = error.errno == errno.EPIPE


def printable(text: str) -> str:
    """Return `text` with each control character written as its escape, `\\x1b` for ESC. Tabs and newlines stay."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return `printable` text on one line, newlines as ⏎ and tabs as spaces."""
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def show(text: object, file: IO[str] | None = None) -> None:
    """Print `printable` text and flush, on standard output or `file`. Raises OutputError."""
    write_output(f"{printable(str(text))}\n", file)


def write_output(text: str, file: IO[str] | None = None) -> None:
    """Write `text` unchanged and flush, to standard output or `file`; nothing when the stream is closed.

    An OSError of a standard stream becomes OutputError. All later output of the stream is then discarded, its buffer
    included, which Python writes when it exits.
    """
    stream = sys.stdout if file is None else file
    if stream is None:
        return
    try:
        if text:  # writing nothing to a full disk is an error without a buffer
            stream.write(text)
        stream.flush()
    except OSError as error:
        if stream not in (sys.stdout, sys.stderr):
            raise
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        raise OutputError(error) from error


def warn(text: object) -> None:
    """Print `printable` text and flush, on standard error. On a terminal long lines are wrapped at words. A failure is
    ignored: no stream is left that could report it."""
    if sys.stderr is not None and sys.stderr.isatty():
        text = "\n".join(wrapped(str(text), min(WIDTH, shutil.get_terminal_size().columns)))
    if sys.stderr is not None:
        with contextlib.suppress(OutputError):
            show(text, sys.stderr)


class LineTimes:
    """When a wait's lines are due: after `first` seconds, then whenever the wait doubles, so that logs stay short."""

    def __init__(self, first: float):
        self._next = first

    def due(self, seconds: float) -> bool:
        """Whether a line is due after `seconds` of waiting. True once for each line."""
        if is_due := seconds >= self._next:
            self._next = 2 * seconds
        return is_due


def wrapped(text: str, width: int = WIDTH, indent: int = 2, whole_words: bool = True) -> list[str]:
    """Return the lines of `text`, wrapped at spaces to `width` columns. Later parts of a line are indented by `indent`
    more spaces. A longer word stays whole, so that a path can be copied, unless `whole_words` is False."""
    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line.rstrip())
            continue
        inner = " " * (len(line) - len(line.lstrip()) + indent)
        lines += textwrap.wrap(
            line, width, subsequent_indent=inner, break_long_words=not whole_words, break_on_hyphens=False
        )
    return lines


def side_by_side(left: Sequence[str], columns: Sequence[Sequence[str]], width: int = WIDTH) -> list[str]:
    """Return the lines of a table: `left`, and beside it the columns, whose cells are already padded. Columns that do
    not fit into `width` continue in another block below, which repeats `left`."""
    blocks = [list(left)]
    for column in columns:
        if len(blocks[-1][0]) > len(left[0]) and max(map(len, column)) + len(blocks[-1][0]) > width:
            blocks.append(list(left))
        blocks[-1] = [line + cell for line, cell in zip(blocks[-1], column, strict=True)]
    return [line for block in blocks for line in block]


class Formatter(logging.Formatter):
    """Formats a log record's message and traceback as printable text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as lines."""
        return printable(super().format(record))


class _LastHandler(logging.Handler):
    """Prints records for which the user's code, or a library, has configured no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            warn(self.format(record))
        except Exception:
            self.handleError(record)


def log_to_stderr() -> None:
    """Print log records on standard error, printable, where no other handler is configured: warnings of libraries, and
    records of this package from `MEGAGRPO_LOG_LEVEL` on.

    The root logger stays free, so `logging.basicConfig` in callbacks and rewards works. Raises LogLevelError.
    """
    handler = _LastHandler()
    handler.setFormatter(Formatter("%(message)s"))
    logging.lastResort = handler
    for chatty in ("httpx", "httpcore"):  # they log every request as INFO, which the user's own handler would print
        logging.getLogger(chatty).setLevel(logging.WARNING)
    set_log_level()


def hide_bars_of_libraries() -> None:
    """Hide libraries' progress bars in pipes, whose lines they break, and on ranks above 0. Call it before imports."""
    if sys.stderr is None or not sys.stderr.isatty() or ENVIRONMENT.get("RANK", "0") != "0":
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            ENVIRONMENT.setdefault(name, "1")


def set_log_level(configured: str | None = None) -> None:
    """Set the level of this package's log records to `log_level(configured)`."""
    logging.getLogger("megagrpo").setLevel(log_level(configured).upper())


def log_level(configured: str | None = None) -> str:
    """Return `MEGAGRPO_LOG_LEVEL`, else `configured` (`run.log_level`), or "info". Raises LogLevelError if unknown."""
    level = ENVIRONMENT.get(LEVEL_VARIABLE) or configured or "info"
    if level not in LEVELS:
        raise LogLevelError(f"{LEVEL_VARIABLE}: {level!r} is not a log level; use one of {', '.join(LEVELS)}")
    return level


def quiets(configured: str, level: str) -> bool:
    """Whether lines of `level` are not printed in a run with `run.log_level: configured`."""
    return LEVELS.index(level) < LEVELS.index(log_level(configured))


def get_logger(name: str) -> logging.Logger:
    """Return the logger `name` for text of models or users: its records are printable before any handler gets them."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape)
    return logger


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True
