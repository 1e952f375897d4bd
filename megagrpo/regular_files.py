"""Opens regular files only: a read of a FIFO waits, and a read of a device may never end."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from pathlib import Path


class NotRegular(OSError):
    """A path that leads to a folder, FIFO, socket or device."""

    def __init__(self, path: str | Path):
        super().__init__(errno.EINVAL, "it is no regular file", str(path))


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open the regular file that `path` leads to, for reading bytes. Raises OSError, and NotRegular before it opens
    anything else."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise NotRegular(path)
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()  # replaced since by a FIFO, whose reading would wait
    raise NotRegular(path)


def read_regular(path: str | Path) -> bytes:
    """Return the content of a regular file. Raises the errors of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def irregular_entry(folder: str | Path) -> str | None:
    """Return the path of an entry of `folder` that is neither a file nor a folder, if any: a library that reads the
    folder could wait there. A folder that cannot be listed has none."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return next((e.path for e in entries if not e.is_file() and not e.is_dir() and os.path.exists(e.path)), None)
    return None
