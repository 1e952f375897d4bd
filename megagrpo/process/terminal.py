"""Text of models, users and other programs on the terminal: control characters are shown as escapes, so they cannot control the terminal.

Escape sequences set titles and the clipboard, hide text or answer as if typed; bidirectional overrides make text look like other text.
Every place that prints text from outside this package uses this module. Files of a run keep the text unchanged.
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
    """Return `text` with each control character written as its escape, `\\x1b` for ESC. Tabs and newlines stay."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return `printable` text on one line, newlines as ⏎ and tabs as spaces."""
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def show(text: object, file: IO[str] | None = None) -> None:
    """Print `printable` text and flush, on standard output or `file`."""
    print(printable(str(text)), file=sys.stdout if file is None else file, flush=True)


def warn(text: object) -> None:
    """Print `printable` text and flush, on standard error."""
    show(text, sys.stderr)


class Formatter(logging.Formatter):
    """Formats a log record's message and traceback as printable text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as lines."""
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Send warnings of all libraries to standard error, printable, unless logging is already configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
