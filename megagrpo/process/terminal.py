"""Text of models, users and other programs on the terminal: what would steer the terminal is shown, and not sent.

Escape sequences set titles and the clipboard, hide text or answer as if typed; bidirectional overrides make text look like other text.
Every place that prints text which this package did not write goes through this file. Files of a run keep the text as it is.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import IO

# C0 but tab and newline, DEL, C1, the marks and overrides of bidirectional text, line separators, surrogates, tags.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """`text` with each character that steers a terminal written as its escape, `\\x1b` for ESC. Tabs and newlines stay."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """`printable` text on one line, newlines as ⏎ and tabs as spaces."""
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def show(text: object, file: IO[str] | None = None) -> None:
    """Print `printable` text and flush, on standard output or `file`."""
    print(printable(str(text)), file=sys.stdout if file is None else file, flush=True)


def warn(text: object) -> None:
    """`show` on standard error."""
    show(text, sys.stderr)


class Formatter(logging.Formatter):
    """The message of a log record and its traceback, printable."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as lines."""
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Send warnings of all libraries to standard error, printable, unless somebody has set up logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
