"""A lock on a run's folder: two processes cannot train into it, and a run notices when it is deleted or replaced.

The lock is `flock` on the file `.lock` in the folder. The kernel releases it when its holder ends, even by SIGKILL.
Rank 0 holds it, so it covers all ranks of a run. Linux passes `flock` on NFS to the server, so the lock also covers
other nodes that mount the folder by NFS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from megagrpo.platform.process.cleanup.ownership import open_lock
from megagrpo.platform.process.cleanup.removal import remove, remove_empty
from megagrpo.records.checkpoints.run_files import make_run_folder

LOCK = ".lock"
# a file system without file locks, such as Lustre mounted without `flock`
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class RunFolderLost(RuntimeError):
    """The folder of this run was deleted, moved or taken over by another run."""


class RunLock:
    """The lock on the run folder `folder`. `take` creates the folder; `release` removes the lock file, and the folder
    if it is empty and `take` created it."""

    def __init__(self, folder: Path):
        self.folder, self._path = folder, folder / LOCK
        self._file: TextIO | None = None
        self._made = False  # whether `take` has created the folder

    def take(self) -> None:
        """Take the lock of the folder at this path. Does nothing if this process holds it.

        Raises ValueError, naming the holder, when another process has the lock, and, naming the folder, when it cannot
        be created. On a file system without locks the run continues without one.
        """
        while not self._is_ours():
            try:
                self._made |= not self.folder.exists()
                make_run_folder(self.folder)
                file = os.fdopen(open_lock(self._path), "r+")
            except OSError as error:
                problem = f"{self.folder} cannot be created or written to: {error.strerror}"
                raise ValueError(f"run.output_dir: {problem}; name another folder") from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    holder = self._path.read_text().strip() or "another process"
                    file.close()
                    raise ValueError(
                        f"run.name: {self.folder} is in use by {holder}; wait until that run ends, or set another "
                        "run.name"
                    ) from None
            self._close()
            # unless the folder was moved or deleted between open and flock: then this goes round again
            self._file = file
        assert self._file is not None, "`_is_ours` checks it"
        self._file.seek(0)
        self._file.truncate()
        print(f"process {os.getpid()} on host {socket.gethostname()}", file=self._file, flush=True)

    def check(self) -> None:
        """Raise RunFolderLost when the folder at this path is no longer the one that this run has locked."""
        if not self._is_ours():
            raise RunFolderLost(
                f"run.output_dir: {self.folder} was deleted, moved or taken over by another run; metrics and "
                "checkpoints of this run cannot be written. Restore the folder and start again with --resume, or start "
                "a new run"
            )

    def release(self) -> None:
        """Release the lock. Does nothing if this process does not hold it."""
        if self._is_ours():
            remove(self._path)
            if self._made:
                remove_empty(self.folder)  # only when the run wrote nothing
        self._close()

    def _is_ours(self) -> bool:
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
                return False
            return True  # the file system does not respond: no proof that the folder is gone

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
