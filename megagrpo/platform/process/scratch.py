"""A folder for the temporary files of this process and its children. The process removes it on exit; after a SIGKILL,
another process does.

Libraries leave files in the temporary directory when their process is killed, and some always do. So each process uses
a folder of its own as the temporary directory. A later process that finds such a folder, whose process has ended,
removes it (`ownership.py`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megagrpo.platform.process.code_caches import INDUCTOR_CACHE, VARIABLES, code_caches
from megagrpo.platform.process.ownership import TEMPORARY, make_folder, owner_in, remove_left
from megagrpo.platform.process.removal import remove_tree
from megagrpo.platform.process.variables import ENVIRONMENT, put


@contextlib.contextmanager
def temporary_files() -> Iterator[Path]:
    """Redirect temporary files of this process and its children to a folder, which this yields and removes on exit.

    Folders that ended processes left are removed on entry and exit. torch's compile cache stays outside the folder, for
    the next run.
    """
    temp_dir = Path(tempfile.gettempdir())
    # beside the parent process's folder, not inside it: socket names must be short
    around = temp_dir.parent if owner_in(temp_dir.name, TEMPORARY) else temp_dir
    remove_left(around, TEMPORARY)
    (folder, lock), owner = make_folder(TEMPORARY, around), os.getpid()
    before = {name: ENVIRONMENT.get(name) for name in ("TMPDIR", *VARIABLES)}
    ENVIRONMENT["TMPDIR"] = tempfile.tempdir = str(folder)
    if INDUCTOR_CACHE not in ENVIRONMENT:
        put({name: path for name, path in code_caches(folder).items() if name not in ENVIRONMENT})
    try:
        yield folder
    finally:
        if os.getpid() == owner:  # not in a fork
            tempfile.tempdir = str(temp_dir)
            put(before)
            remove_tree(folder)
            os.close(lock)
            remove_left(around, TEMPORARY)
