"""Markdown of values from configs and metrics. Text of any kind is shown as it is: it adds no markup, no HTML and no
table cells."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megagrpo.platform.process.terminal import one_line, printable

LONGEST = 200  # characters of one value


def code(value: object) -> str:
    """Return `value` as a code span on one line, shortened to LONGEST characters."""
    text = one_line(str(value)).strip()
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    ticks = _ticks(text, shortest=1)
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`" if text else "(empty)"


def block(text: str, language: str) -> str:
    """Return `text` as a fenced code block that no line of `text` can close."""
    ticks = _ticks(text, shortest=3)
    return f"{ticks}{language}\n{printable(text).strip()}\n{ticks}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. A pipe in a cell does not end the cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _ticks(text: str, shortest: int) -> str:
    """Return a run of backticks that is longer than every run in `text`."""
    return "`" * max([shortest, *(len(run) + 1 for run in re.findall("`+", text))])
