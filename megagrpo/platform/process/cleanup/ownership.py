"""Whose a folder in a shared place (`/tmp`, `/dev/shm`) is, and whether its owner has ended.

A folder of a process is named PREFIX, process id, random characters. It contains a lock file that the process locks
(`flock`) while it lives. The kernel releases the lock when the process ends, and a lock is valid across containers and
PID namespaces; a process id is not.

A folder is removed only when its name parses completely, it belongs to this user, its lock file has been locked once,
and no process holds the lock now. This also holds for root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megagrpo.platform.process.cleanup.removal import opened, remove_own_file, remove_tree

OWNER_LOCK = ".lock"
TEMPORARY = "megagrpo_tmp_"  # prefix of a process's folder for temporary files (`scratch.py`)
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OWNER = r"(\d+\.[a-z0-9_]{8})"  # process id, and the characters of tempfile.mkdtemp


def make_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    """Create this process's folder in `parent`. Returns it and its lock's descriptor, whose closing releases the lock.

    Where files cannot be locked, the lock file stays empty, and only this process removes the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}.", dir=parent))
    lock = open_lock(folder / OWNER_LOCK)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, f"{os.getpid()}\n".encode())  # after the lock: an empty lock file may be about to be locked
    return folder, lock


def open_lock(path: Path) -> int:
    """Open a lock file for reading and writing, create it if missing, and return its descriptor. Raises OSError for a
    link, which could point to somebody's file."""
    return os.open(path, _FLAGS | os.O_CREAT, 0o666)


def owner_in(name: str, prefix: str) -> str:
    """Return the owner in the name of a folder, "" when the name is not one that `make_folder` gives."""
    match = re.fullmatch(re.escape(prefix) + _OWNER, name)
    return match[1] if match else ""


def remove_left(parent: Path, prefix: str, labels: Sequence[str] = ()) -> None:
    """Remove folders of ended processes in `parent`, and files beside them that are named LABEL, owner, `-`, anything.

    Errors are ignored: what cannot be removed stays, and a later call tries again.
    """
    for name in _names(parent):
        if owner_in(name, prefix):
            remove_if_left(parent / name, prefix, labels)


def remove_if_left(folder: Path, prefix: str, labels: Sequence[str] = ()) -> None:
    """Do as `remove_left` does with one folder."""
    user = os.geteuid()
    if not (owner := owner_in(folder.name, prefix)):
        return
    with contextlib.suppress(OSError), opened(folder, owner=user) as inside:
        lock = os.open(OWNER_LOCK, _FLAGS, dir_fd=inside)
        try:
            status = os.fstat(lock)
            if not (stat.S_ISREG(status.st_mode) and status.st_uid == user and status.st_size):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            of_owner = tuple(f"{label}{owner}-" for label in labels)
            if all(
                [
                    remove_own_file(folder.parent / name)
                    for name in _names(folder.parent)
                    if of_owner and name.startswith(of_owner)
                ]
            ):
                remove_tree(folder, owner=user)  # last: a file without its owner's folder would stay for ever
        finally:
            os.close(lock)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
