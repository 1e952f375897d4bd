"""A file of JSON lines that survives kills and full disks, and that a resumed run cuts back to its checkpoint."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

LONG = 256  # characters of a text that msgspec encodes
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_MARK = "\0long text\0"
_LONG_TEXT = json.dumps(_MARK).encode()


class JsonlFile:
    """Appends JSON lines to a file, which holds whole lines alone. NaN and infinity become null."""

    def __init__(self, path: Path, last_step: int):
        """Open the file. Lines of steps after `last_step`, and a line that a kill truncated, are cut from its end."""
        self._file = open(path, "ab", buffering=0)
        self._file.truncate(_end_of_step(path, last_step))

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append a line per row."""
        self.append_lines(encoded(rows))

    def append_lines(self, lines: bytes) -> None:
        """Append whole lines, as `encoded` returns them. A line that a full disk breaks is removed."""
        end, data = self._file.seek(0, os.SEEK_END), memoryview(lines)
        try:
            while data:
                # unbuffered: with a full disk, write() writes a part and the next call raises
                data = data[self._file.write(data) :]
        except OSError:
            self._file.truncate(end + lines.rfind(b"\n", 0, len(lines) - len(data)) + 1)
            raise

    def store(self, parts: Iterable[bytes]) -> StoredRows:
        """Append parts of whole lines, one after the other, and return their rows."""
        start, count = self._file.seek(0, os.SEEK_END), 0
        for lines in parts:
            self.append_lines(lines)
            count += lines.count(b"\n")
        return StoredRows(Path(self._file.name), start, count)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class StoredRows:
    """Rows of a file, `count` lines from byte `start` on. Each iteration reads them from the file, one by one."""

    path: Path
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with open(self.path, "rb") as lines:
            lines.seek(self.start)
            for line in islice((line for line in lines if line.strip()), self.count):
                yield json.loads(line)


def encoded(rows: Iterable[dict[str, Any]]) -> bytes:
    """Return the JSON lines of the rows. A lone surrogate has no UTF-8 bytes, so it becomes its JSON escape."""
    return b"".join(map(_line, rows))


def _line(row: dict[str, Any]) -> bytes:
    """Return the bytes of `json.dumps`. msgspec encodes long texts: the same bytes, in a seventh of the time."""
    texts: list[bytes] = []
    parts = _dumps(_finite(row, texts)).split(_LONG_TEXT)
    if len(parts) != len(texts) + 1:  # a text of the row equals the mark
        parts, texts = [_dumps(_finite(row))], []
    return b"".join(chain(*zip(parts, [*texts, b"\n"], strict=True)))


def _dumps(value: Any) -> bytes:
    return _ENCODER.encode(value).encode(errors="backslashreplace")


def _end_of_step(path: Path, last_step: int) -> int:
    """Return the bytes up to the last line of a step that is at most `last_step`. Only lines after it are read."""
    end = path.stat().st_size
    if not end:
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        while end and _step_of(lines[(start := lines.rfind(b"\n", 0, end - 1) + 1) : end]) > last_step:
            end = start
    return end


def _step_of(line: bytes) -> float:
    """Return the step of a JSON line; infinity when the line is incomplete."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any, texts: list[bytes] | None = None) -> Any:
    """Return a JSON value with null for NaN and infinity. `texts`, if given, takes the JSON of long texts, for which
    the value then holds a mark."""
    if isinstance(value, dict):
        return {str(k): _finite(v, texts) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v, texts) for v in value]
    if texts is not None and isinstance(value, str) and len(value) >= LONG:
        with suppress(UnicodeEncodeError):  # a lone surrogate
            texts.append(msgspec.json.encode(value))
            return _MARK
    return None if isinstance(value, float) and not math.isfinite(value) else value
