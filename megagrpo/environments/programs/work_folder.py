"""Files in and out of a program's work folder. The program may have replaced any name in it by a link, a FIFO or a
folder: what is written and read here follows no link, and stays below the folder.

This module imports the standard library only.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from megagrpo.platform.process.cleanup.removal import opened, remove

PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")  # `${NAME}` is a shell's
_NUMBER_BYTES = 100
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def text_of(value: Any) -> str:
    """Return a row's value as text: JSON if it is none."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Return `text` with the values of its placeholders, which are not searched for placeholders again."""
    return PLACEHOLDER.sub(lambda match: text_of(values[match[1]]), text)


def parts_of(name: str) -> list[str]:
    """Return the parts of a path below the work folder. Raises ValueError for one that leads out of it."""
    parts = name.rstrip("/").split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r:.200} is no name below the work folder; write it as a/b, without `..`")
    return parts


def put_files(folder: Path, files: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Write `files`, name -> source, below `folder`; what has the name is removed before. A source that is one
    placeholder is content: text, or a mapping of names to texts. Another one is the path of a file or a folder.

    Raises ValueError for a name that leads out of its folder, OSError for a path that cannot be copied.
    """
    for name, source in files.items():
        parts, column = parts_of(name), PLACEHOLDER.fullmatch(source)
        with _parent(folder, parts) as parent:
            remove(f"/proc/self/fd/{parent}/{parts[-1]}")
        if column is None:
            _copy(folder, parts, Path(_path(source, values)))
        elif isinstance(content := values[column[1]], Mapping):
            for below, text in content.items():
                if text is None:  # Arrow gives every row the names of all rows
                    continue
                _write(folder, [*parts, *parts_of(below)], text_of(text).encode(errors="surrogatepass"))
        else:
            _write(folder, parts, text_of(content).encode(errors="surrogatepass"))


def remove_below(folder: Path, parts: Sequence[str]) -> None:
    """Remove a file, a link or a folder, if its parent exists."""
    with suppress(OSError), _parent(folder, parts, creates=False) as parent:
        remove(f"/proc/self/fd/{parent}/{parts[-1]}")


def read_number(folder: Path, name: str) -> float:
    """Return the number in a file. Raises ValueError for anything else."""
    text = _read(folder, name, _NUMBER_BYTES + 1)
    with suppress(ValueError):
        if len(text) <= _NUMBER_BYTES and math.isfinite(number := float(text)):
            return number
    raise ValueError(f"{name} holds no finite number: {text[:_NUMBER_BYTES]!r}")


def read_text(folder: Path, name: str, most: int) -> str | None:
    """Return a file as text, with the error handler surrogateescape for what is not UTF-8; None for more than `most`
    bytes, and for what is no regular file."""
    try:
        content = _read(folder, name, most + 1)
    except ValueError:
        return None
    return content.decode(errors="surrogateescape") if len(content) <= most else None


def _read(folder: Path, name: str, count: int) -> bytes:
    """Return at most `count` bytes of a regular file. Raises ValueError for anything else."""
    try:
        with _parent(folder, parts := parts_of(name), creates=False) as parent:
            file = os.open(parts[-1], os.O_RDONLY | _FILE, dir_fd=parent)
        with os.fdopen(file, "rb") as opened_file:
            if stat.S_ISREG(os.fstat(file).st_mode):
                return opened_file.read(count)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    raise ValueError(f"{name} is no regular file")


def _path(source: str, values: Mapping[str, Any]) -> str:
    names = [
        name
        for name in PLACEHOLDER.findall(source)
        if (text := text_of(values[name])) in ("", ".", "..") or "/" in text
    ]
    if names:
        raise ValueError(f"column `{names[0]}` is part of the path {source}, so it must be one name without `/`")
    return filled(source, values)


@contextmanager
def _parent(folder: Path, parts: Sequence[str], creates: bool = True) -> Iterator[int]:
    """Yield a descriptor of the folder above `parts`. What is no folder on the way is replaced by one, or with
    `creates` False an OSError."""
    with ExitStack() as stack:
        here = stack.enter_context(opened(folder))
        for part in parts[:-1]:
            try:
                here = stack.enter_context(opened(part, here))
            except OSError:
                if not creates:
                    raise
                remove(f"/proc/self/fd/{here}/{part}")
                os.mkdir(part, dir_fd=here)
                here = stack.enter_context(opened(part, here))
        yield here


def _write(folder: Path, parts: Sequence[str], content: bytes) -> None:
    with _parent(folder, parts) as parent:
        file = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FILE, 0o666, dir_fd=parent)
        with os.fdopen(file, "wb") as opened_file:
            opened_file.write(content)


def _copy(folder: Path, parts: Sequence[str], source: Path) -> None:
    """Copy a file or a folder; links in it stay links."""
    if source.is_dir():
        for entry in os.scandir(source):
            below = [*parts, entry.name]
            if entry.is_symlink():
                with _parent(folder, below) as parent:
                    os.symlink(os.readlink(entry.path), entry.name, dir_fd=parent)
            else:
                _copy(folder, below, Path(entry.path))
        with _parent(folder, [*parts, ""]):  # also an empty one
            return
    if not source.is_file():
        raise ValueError(f"{source} is no file or folder")
    with _parent(folder, parts) as parent, source.open("rb") as read:
        mode = stat.S_IMODE(os.fstat(read.fileno()).st_mode)
        file = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, mode | 0o200, dir_fd=parent)
        with os.fdopen(file, "wb") as write:
            shutil.copyfileobj(read, write)
