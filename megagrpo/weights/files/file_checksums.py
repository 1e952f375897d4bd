"""File names and CRC-32 checksums of a checkpoint's files: a name outside of the folder is rejected before any file is
opened, and a damaged file is detected and named.

The checksums detect damage by disks, networks and memory, not deliberate changes."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any


def check_inside(names: Iterable[Any], source: Path) -> None:
    """Raises ValueError if a file name in `source` leaves its folder. Symbolic links pass: the hub cache uses them."""
    for name in names:
        inside = isinstance(name, str) and name and "\0" not in name
        if not inside or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            why = f"{source} names the file {name!r}, which is not inside its folder"
            raise ValueError(f"model: {why}; do not use this download")


CHECKSUMS = "checksums.json"  # file -> CRC-32, for all other files of the folder
_CHUNK = 2**24


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return path within `folder` -> CRC-32 as 8 hex digits, for each of the `files`."""
    return {str(file.relative_to(folder)): f"{_crc(file):08x}" for file in files}


def ahead_file(replica: int | str) -> str:
    """Return the name of the file with the groups that a replica generated ahead."""
    return f"ahead_{replica}.jsonl"


def verify_tensors(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Raises ValueError naming the first file with tensors, or with groups generated ahead, that is missing or has a
    wrong CRC-32.

    Files are divided over `parts` by the rank that wrote them: in the same layout each rank verifies those it reads.
    """
    listed = _listed(folder)
    mine = [name for name in listed if (rank := _writer(name)) is not None and rank % parts == part]
    _verify(folder, {name: listed[name] for name in mine})


def verify_others(folder: Path) -> None:
    """Like `verify_tensors`, for all other files."""
    _verify(folder, {name: crc for name, crc in _listed(folder).items() if _writer(name) is None})


def verify_inside(folder: Path) -> None:
    """Like `verify_others`, for a folder inside a checkpoint, such as an adapter. Any other folder passes."""
    if (folder.parent / CHECKSUMS).is_file():
        listed = _listed(folder.parent).items()
        _verify(folder.parent, {name: crc for name, crc in listed if name.startswith(f"{folder.name}/")})


def _verify(folder: Path, written: dict[str, str]) -> None:
    for name, crc in written.items():
        file = folder / name
        if not file.is_file():
            why = f"it lacks {name}, which {CHECKSUMS} names"
            raise ValueError(f"{folder} is damaged: {why}; copy the checkpoint again")
        if (actual := f"{_crc(file):08x}") != crc:
            raise ValueError(f"{file} is corrupt: its CRC-32 is {actual}; {crc} was written; copy the checkpoint again")


def _listed(folder: Path) -> dict[str, str]:
    try:
        listed = dict(json.loads((folder / CHECKSUMS).read_text()))
    except OSError as error:
        raise ValueError(f"{folder} is damaged: {error}; copy the checkpoint again") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / CHECKSUMS} is corrupt: {error!r}; copy the checkpoint again") from None
    check_inside(listed, folder / CHECKSUMS)
    return listed


def _writer(name: str) -> int | None:
    """Return the rank that wrote a tensor file, the replica of groups generated ahead, or None for other files."""
    match = re.fullmatch(rf"__(\d+)_\d+\.distcp|{ahead_file('([0-9]+)')}", name)
    return int(match[1] or match[2]) if match else None


def _crc(file: Path) -> int:
    value, buffer = 0, bytearray(_CHUNK)
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            value = zlib.crc32(memoryview(buffer)[:count], value)
    return value
