"""Writes a small text file in one step: readers see the previous file, if any, or the whole new one."""

from __future__ import annotations

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write `text` in UTF-8 to `path`. A kill may leave `.NAME.partial` beside it. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
