"""A file of JSON lines that survives kills and full disks, and that a resumed run cuts back to its checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class JsonlFile:
    """Appends JSON lines to a file. A line broken by a full disk is alone on its line. NaN and infinity become null."""

    def __init__(self, path: Path, last_step: int):
        """Open the file. Lines of steps after `last_step`, and a line that a kill truncated, are removed."""
        if path.exists():
            rewritten = path.with_suffix(".rewriting")
            with open(path, "rb") as lines, open(rewritten, "wb") as file:
                file.writelines(line for line in lines if _step_of(line) <= last_step)
            os.replace(rewritten, path)
        self._file = open(path, "ab", buffering=0)
        self._broken_line = False

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        # A lone surrogate has no UTF-8 bytes, so it is written as its JSON escape.
        data = memoryview((("\n" if self._broken_line else "") + lines).encode(errors="backslashreplace"))
        self._broken_line = bool(data)
        while data:
            # unbuffered: with a full disk, write() writes a part and the next call raises
            data = data[self._file.write(data) :]
        self._broken_line = False

    def close(self) -> None:
        self._file.close()


def _step_of(line: bytes) -> float:
    """Return the step of a JSON line; infinity when the line is incomplete."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
