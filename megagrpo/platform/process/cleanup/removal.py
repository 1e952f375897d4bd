"""Removes files and folders. Every removal in this package goes through this module.

A removal raises no OSError, follows no link and leaves mount points alone. It does not recurse: Python 3.12's
shutil.rmtree does, and a program can nest more folders than Python has stack frames or a path has bytes. `ownership.py`
decides what may be removed from a folder that others share.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_ATTEMPTS = 3  # attempts to remove a folder that a process still writes to
_NO_LINK = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Name = str | os.PathLike[str]


def remove(path: Name) -> bool:
    """Remove a file, a folder and its content, or only a link. Returns whether nothing is left at `path`."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return remove_tree(path)
    return True


def remove_tree(folder: Name, owner: int | None = None) -> bool:
    """Remove `folder` and its content. Returns whether the folder is gone; False at once for a link. With `owner`, a
    folder of another user stays.

    Every folder is first moved to the top, and one folder is open at a time. A mount point cannot be moved, so its
    content stays. Folders without permissions get them.
    """
    for _ in range(_ATTEMPTS):
        try:
            with opened(folder, owner=owner) as top:
                _empty(top)
            os.rmdir(folder)
        except FileNotFoundError:
            return True
        except (NotADirectoryError, PermissionError):
            return False
        except OSError:
            continue
        return True
    return False


def remove_own_file(path: Name, inode: int | None = None) -> bool:
    """Remove a regular file of this user, with this inode if given. Returns whether nothing is left at `path`."""
    try:
        if is_own_file(path, inode):
            os.unlink(path)
    except OSError:
        pass
    return not os.path.lexists(path)


def is_own_file(path: Name, inode: int | None = None) -> bool:
    """Whether `path` is a regular file of this user, with this inode if given."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and inode in (None, status.st_ino)


def remove_empty(folder: Name) -> None:
    """Remove a folder if it is empty."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new temporary folder, and remove it with whatever is in it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        remove_tree(folder)


def _empty(top: int) -> None:
    """Remove as much as possible of the content of an open folder."""
    prefix, moved, pending = secrets.token_hex(8), 0, list[str]()

    def take_from(folder: int) -> None:
        """Unlink the files of an open folder, and move its folders to the top."""
        nonlocal moved
        for below in _unlink_files(folder):
            moved += 1
            # a move writes `..`, which takes the right to write
            with contextlib.suppress(OSError), opened(below, folder):
                os.rename(below, f"{prefix}{moved}", src_dir_fd=folder, dst_dir_fd=top)
                pending.append(f"{prefix}{moved}")

    take_from(top)
    while pending:
        name = pending.pop()
        with contextlib.suppress(OSError):
            with opened(name, top) as folder:
                take_from(folder)
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
def opened(name: Name, within: int | None = None, owner: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a folder whose owner can now read, write and enter it. Raises OSError when `name` is not a
    folder, is a link or does not belong to the user `owner`."""
    handle = os.open(name, os.O_PATH | _NO_LINK, dir_fd=within)
    try:
        status = os.fstat(handle)
        if owner is not None and status.st_uid != owner:
            raise PermissionError(f"{name} belongs to another user")
        if status.st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)  # fchmod rejects a descriptor that was opened with O_PATH
        folder = os.open(".", os.O_RDONLY | _NO_LINK, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield folder
    finally:
        os.close(folder)
