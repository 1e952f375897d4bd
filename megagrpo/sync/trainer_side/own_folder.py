"""A folder in shared memory that its process removes, or a helper process if that one is killed."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from megagrpo.platform.process.cleanup.ownership import make_folder
from megagrpo.platform.process.cleanup.removal import remove_tree
from megagrpo.platform.process.cleanup.shm_names import FOLDER, SHARED_MEMORY, remove_stale
from megagrpo.sync.trainer_side.orphaned_files import remove_when_orphaned


class OwnFolder:
    """This process's new folder `path` in `parent`. Raises OSError when it cannot be created."""

    def __init__(self, parent: Path = SHARED_MEMORY):
        remove_stale(parent)
        parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = make_folder(FOLDER, parent)
        self._pid, self._remover = os.getpid(), remove_when_orphaned(self.path)
        self._open = True
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
