"""Whose a folder in a shared place (`/tmp`, `/dev/shm`) is, and whether its owner has ended.

A folder of a process is named PREFIX, process id, random characters. It contains a lock file that the process locks
(`flock`) while it lives. The kernel releases the lock when the process ends, and a lock is valid across containers and
PID namespaces; a process id is not.

A folder is removed only when its name parses completely, it belongs to this user, its lock file has been locked once,
and no process holds the lock now. This also holds for root.

A process that creates files in /dev/shm has a folder `megagrpo-OWNER` there, where a trainer keeps its weights.
Segments that vLLM creates through Python's `multiprocessing.shared_memory` begin with `psm_megagrpo-OWNER-`, those of
its CPU workers (tp above 1) with `vllm_dist_megagrpo-OWNER-`, where the owner is their EngineCore.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import re
import secrets
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megagrpo.platform.process.cleanup.removal import is_own_file, opened, remove_own_file, remove_tree

OWNER_LOCK = ".lock"
TEMPORARY = "megagrpo_tmp_"  # prefix of a process's folder for temporary files (`scratch.py`)
SHARED_MEMORY = Path("/dev/shm")
FOLDER, SEGMENTS, CPU_WORKERS = "megagrpo-", "psm_megagrpo-", "vllm_dist_megagrpo-"
_PERIOD = 0.2  # seconds between two looks at a parent, and between two removals
_NUM_REMOVALS = range(10, 50)  # fewest and most removals after its end
_PACKAGE_ROOT = Path(__file__).resolve().parents[4]  # the folder that holds the package megagrpo
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
            files = [folder.parent / name for name in _names(folder.parent) if of_owner and name.startswith(of_owner)]
            # a name that another user or no regular file has must not keep the folder
            if all([remove_own_file(file) for file in files if is_own_file(file)]):
                remove_tree(folder, owner=user)  # last: a file without its owner's folder would stay for ever
        finally:
            os.close(lock)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


# ------------------------------------------------------------------------------------------------------- shared memory


def owned(label: str) -> str:
    """Return a name for a new file of this process in /dev/shm: LABEL, owner and random characters."""
    return f"{label}{_owner(os.getpid())}-{secrets.token_hex(4)}"


@functools.cache
def _owner(pid: int) -> str:
    """Create this process's folder, locked until the process ends, and return its name's owner. A fork has its own."""
    return owner_in(make_folder(FOLDER, SHARED_MEMORY)[0].name, FOLDER)


def name_segments_by_owner() -> None:
    """Make `multiprocessing.shared_memory` name segments after the creating process, here and in child processes."""
    from multiprocessing import shared_memory

    vars(shared_memory).update(_make_filename=lambda: f"/{owned(SEGMENTS)}")


def remove_stale(folder: Path = SHARED_MEMORY) -> None:
    """Remove weights and segments in `folder` whose owner has ended."""
    remove_left(folder, FOLDER, (SEGMENTS, CPU_WORKERS))


class OwnFolder:
    """This process's new folder `path` in `parent`. Raises OSError when it cannot be created.

    Another process removes the folder when this one ends by SIGKILL, even with its supervisors, and the segments of
    servers that ended with it. It has a session of its own, which no signal to this process's group reaches.
    """

    def __init__(self, parent: Path = SHARED_MEMORY):
        remove_stale(parent)
        parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = make_folder(FOLDER, parent)
        self._pid, self._open = os.getpid(), True
        code = f"import sys; sys.path.append({str(_PACKAGE_ROOT)!r}); from {__name__} import _when_orphaned; "
        command = [sys.executable, "-I", "-S", "-c", f"{code}_when_orphaned({self._pid}, sys.argv[1])", str(self.path)]
        null = subprocess.DEVNULL
        self._remover = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder. Does nothing on a second call or in a forked child."""
        if not self._open or os.getpid() != self._pid:
            return
        self._open = False
        remove_tree(self.path)
        os.close(self._lock)
        self._remover.kill()
        self._remover.wait()
        atexit.unregister(self.close)


def _when_orphaned(parent: int, folder: str) -> None:
    """Wait for the end of the parent, and remove what it has left. Servers and other ranks end a little later."""
    while os.getppid() == parent:
        time.sleep(_PERIOD)
    for attempt in range(_NUM_REMOVALS.stop):
        remove_stale(Path(folder).parent)
        time.sleep(_PERIOD)
        if attempt >= _NUM_REMOVALS.start and not os.path.exists(folder):
            return
