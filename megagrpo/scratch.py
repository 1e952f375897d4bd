"""A folder for the temporary files of this process and of all that it starts, gone with it however it ends.

Libraries leave files in the temporary directory when their process is killed, and some always do. So it lies below a folder of the
process's own; who finds such a folder whose process has ended removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "megagrpo_tmp_"  # rollout/supervisor.py knows it too
LOCK = ".lock"  # held as long as the process lives; unlike a process id it means the same in every container
COMPILED = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def temporary_files() -> Iterator[Path]:
    """Temporary files of this process and of its children go into the folder this gives, which is removed on the way out.

    What others that are gone have left is removed at both ends. What torch has compiled stays where it is, for the next run.
    """
    given = Path(tempfile.gettempdir())
    around = given.parent if given.name.startswith(PREFIX) else given  # beside that of the process above: names of sockets are short
    remove_left(around)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=around))
    lock, owner = (folder / LOCK).open("w"), os.getpid()
    fcntl.flock(lock, fcntl.LOCK_EX)
    print(owner, file=lock, flush=True)  # an empty one may be about to be locked
    before = {name: os.environ.get(name) for name in ("TMPDIR", COMPILED)}
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ.setdefault(COMPILED, str(around / f"torchinductor_{os.getuid()}"))
    try:
        yield folder
    finally:
        if os.getpid() == owner:  # not in a fork
            tempfile.tempdir = str(given)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()
            remove_left(around)


def remove_left(around: Path) -> None:
    """Remove folders whose process has ended, those that may be removed."""
    for lock in around.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.stat().st_size:
                shutil.rmtree(lock.parent, ignore_errors=True)
