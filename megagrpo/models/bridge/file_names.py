"""Checks file names that a downloaded folder lists: a name outside of the folder is rejected before any file is
opened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any


def check_inside(names: Iterable[Any], source: Path) -> None:
    """Raises ValueError when a file name in `source` leaves the folder of `source`. Symbolic links pass, because the
    hub's cache uses them."""
    for name in names:
        inside = isinstance(name, str) and name and "\0" not in name
        if not inside or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(
                f"model: {source} names the file {name!r}, which is not inside its folder; do not use this download"
            )
