"""What identifies a data set: its name, its number of rows and a checksum of each row's values."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from megagrpo.config import DatasetSection

_DIGEST = 8  # bytes for each row
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of a decoded image


class DataIdentity:
    """Identifies the rows of a data set; `add` takes them in order, at 8 bytes of memory a row and about 2 ms a MB.

    Neither the format of the file nor the order of columns matters, nor a column that a row lacks or that JSON cannot
    hold.
    """

    def __init__(self, section: DatasetSection):
        parts = [section.source, section.subset or "", section.split]
        self.name = " ".join(filter(None, parts))
        self._digests = array("Q")

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the columns of the next row."""
        digest = blake2b(digest_size=_DIGEST)
        for name, value in sorted(values.items()):
            if value is not None:
                content = _content(value)
                digest.update(f"{name!r}{len(content)}".encode() + content)
        self._digests.append(int.from_bytes(digest.digest(), "little"))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"name": self.name, "rows": len(self._digests), "checksum": self._checksum(len(self._digests))}

    def kept_rows(self, saved: Mapping[str, Any]) -> int | None:
        """Return how many of the rows in a saved `state` these rows begin with: all or 0. None if nothing has changed,
        and for an older checkpoint without a state."""
        if not saved.get("checksum"):
            return None
        rows, own = int(saved["rows"]), len(self._digests)
        if rows > own or self._checksum(rows) != saved["checksum"]:
            return 0
        return None if rows == own else rows

    def _checksum(self, rows: int) -> str:
        return blake2b(self._digests[:rows].tobytes(), digest_size=_DIGEST).hexdigest()


def described(state: Mapping[str, Any]) -> str:
    """Return a saved `state` as words of a message."""
    return f"{state['name']} ({state['rows']} rows, checksum {state['checksum']})"


def _content(value: Any) -> bytes:
    if isinstance(value, str):  # without JSON's copy, which takes most of the time of a long prompt
        return b"text" + value.encode(errors="surrogatepass")
    try:
        return json.dumps(value, sort_keys=True, default=_as_text).encode()
    except (TypeError, ValueError, RecursionError):  # keys that are no texts, deep nesting
        return type(value).__name__.encode()


def _as_text(value: Any) -> Any:
    """Return a value that JSON has not, so that equal values give equal texts in every process."""
    if isinstance(value, bytes | bytearray | memoryview):
        return blake2b(value, digest_size=_DIGEST).hexdigest()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return _ADDRESS.sub("", str(value))
