"""A folder for the temporary files of this process and its children. The process removes it on exit; after a SIGKILL, another process does.

Libraries leave files in the temporary directory when their process is killed, and some always do. So each process uses a folder of its own
as the temporary directory. A later process that finds such a folder, whose process has ended, removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "megagrpo_tmp_"  # prefix of the folder's name; servers/supervisor.py has a copy
LOCK = ".lock"  # locked while the process lives; unlike a process id, a lock is valid across containers
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_ATTEMPTS = 3  # attempts to remove a folder that a process still writes to
_NO_LINK = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def temporary_files() -> Iterator[Path]:
    """Redirect temporary files of this process and its children to a folder, which this yields and removes on exit.

    Folders that ended processes left are removed on entry and exit. torch's compile cache stays outside the folder, for the next run.
    """
    temp_dir = Path(tempfile.gettempdir())
    # beside the parent process's folder, not inside it: socket names must be short
    around = temp_dir.parent if temp_dir.name.startswith(PREFIX) else temp_dir
    remove_left(around)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=around))
    lock, owner = (folder / LOCK).open("w"), os.getpid()
    fcntl.flock(lock, fcntl.LOCK_EX)
    print(owner, file=lock, flush=True)  # an empty lock file may be about to be locked
    before = {name: os.environ.get(name) for name in ("TMPDIR", COMPILED)}
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ.setdefault(COMPILED, str(around / f"torchinductor_{os.getuid()}"))
    try:
        yield folder
    finally:
        if os.getpid() == owner:  # not in a fork
            tempfile.tempdir = str(temp_dir)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            remove_tree(folder)
            lock.close()
            remove_left(around)


def remove_left(around: Path) -> None:
    """Remove the folders of processes that have ended; errors are ignored."""
    for lock in around.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.stat().st_size:
                remove_tree(lock.parent)


def remove_tree(folder: str | os.PathLike[str]) -> bool:
    """Remove `folder` and its content, which another program created. Returns whether the folder is gone; raises no OSError.

    Python 3.12's shutil.rmtree recurses, and a program can nest more folders than Python has stack frames or a path has bytes. So every
    folder is first moved to the top, and one folder is open at a time. Folders without permissions get them. No symbolic link is followed.
    """
    for _ in range(_ATTEMPTS):
        try:
            with _opened(folder) as top:
                _empty(top)
            os.rmdir(folder)
        except FileNotFoundError:
            return True
        except OSError:
            continue
        return True
    return False


def _empty(top: int) -> None:
    """Remove as much as possible of the content of an open folder."""
    prefix, moved, pending = secrets.token_hex(8), 0, _unlink_files(top)
    while pending:
        name = pending.pop()
        with contextlib.suppress(OSError):
            with _opened(name, top) as folder:
                for below in _unlink_files(folder):
                    moved += 1
                    with contextlib.suppress(OSError), _opened(below, folder):  # a move writes `..`, which takes the right to write
                        os.rename(below, f"{prefix}{moved}", src_dir_fd=folder, dst_dir_fd=top)
                        pending.append(f"{prefix}{moved}")
            os.rmdir(name, dir_fd=top)


def _unlink_files(folder: int) -> list[str]:
    """Unlink all entries of an open folder except folders. Returns the names of the folders."""
    with os.scandir(folder) as listing:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing]
    for name, is_folder in entries:
        if not is_folder:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in entries if is_folder]


@contextlib.contextmanager
def _opened(name: str | os.PathLike[str], within: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a folder whose owner can now read, write and enter it. Raises OSError when `name` is not a folder or belongs to
    another user."""
    handle = os.open(name, os.O_PATH | _NO_LINK, dir_fd=within)
    try:
        if os.fstat(handle).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)  # fchmod rejects a descriptor that was opened with O_PATH
        folder = os.open(".", os.O_RDONLY | _NO_LINK, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield folder
    finally:
        os.close(folder)
