"""A folder for the temporary files of this process and its children, and the caches of compiled code.

The process removes the folder on exit; after a SIGKILL, another process does.
Libraries leave files in the temporary directory when their process is killed, and some always do. So each process uses
a folder of its own as the temporary directory. A later process that finds such a folder, whose process has ended,
removes it (`ownership.py`).

Caches of compiled code are kept for the next run. A process runs what they hold, so no other user may write there.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megagrpo.platform.process.cleanup.ownership import TEMPORARY, make_folder, owner_in, remove_left
from megagrpo.platform.process.cleanup.removal import remove_tree
from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT, put

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# caches of libraries below the home folder -> their folder among temporary files when the home folder is not private
_OF_LIBRARIES = {
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
CACHE_VARIABLES = (INDUCTOR_CACHE, *_OF_LIBRARIES)
_LINKS = 40  # the kernel's limit for links in a path


@contextlib.contextmanager
def temporary_files() -> Iterator[Path]:
    """Redirect temporary files of this process and its children to a folder, which this yields and removes on exit.

    Folders of ended processes are removed on entry and exit. torch's compile cache stays outside, for the next run.
    """
    temp_dir = Path(tempfile.gettempdir())
    # beside the parent process's folder, not inside it: socket names must be short
    around = temp_dir.parent if owner_in(temp_dir.name, TEMPORARY) else temp_dir
    remove_left(around, TEMPORARY)
    (folder, lock), owner = make_folder(TEMPORARY, around), os.getpid()
    before = {name: ENVIRONMENT.get(name) for name in ("TMPDIR", *CACHE_VARIABLES)}
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


def user_cache() -> Path:
    """Return the user's cache: $XDG_CACHE_HOME if absolute, else ~/.cache. Raises RuntimeError without a home."""
    named = Path(ENVIRONMENT.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def code_caches(temporary: Path) -> dict[str, str]:
    """Return variable -> folder of this run's compiled-code caches. torch's stays in the user's cache for later runs.

    If another user could write there or to the home folder, all caches go to `temporary`, and a warning names the
    reason. Without a home folder that this user can write to, they go there without a warning: nothing is kept.
    """
    try:
        folder = user_cache() / "megagrpo" / "torchinductor"
        problem = not_private(folder, create=True) or not_private(Path.home())
        if not problem:
            return {INDUCTOR_CACHE: str(folder)}
    except (OSError, RuntimeError):
        problem = ""
    if problem and ENVIRONMENT.get("RANK", "0") == "0":
        warn(
            f"warning: {problem}, so code that this run compiles is not kept for the next run; set {INDUCTOR_CACHE} to "
            "a folder that only you can write to"
        )
    return {INDUCTOR_CACHE: str(temporary / "torchinductor")} | {
        name: str(temporary / below) for name, below in _OF_LIBRARIES.items()
    }


def not_private(folder: Path, create: bool = False) -> str:
    """Return why another user could put files into `folder`, "" if none can. All folders and links on its path count.

    root may own any. With `create`, missing folders are created with mode 0700. Raises OSError when one cannot be.
    """
    user, here, links = os.geteuid(), Path("/"), 0
    left = [*reversed(folder.parts[1:])]
    while True:
        status = os.stat(here)
        # a user's own group
        shared = status.st_mode & (stat.S_IWOTH if status.st_gid == status.st_uid else stat.S_IWOTH | stat.S_IWGRP)
        if shared and not (left and status.st_mode & stat.S_ISVTX):
            return f"other users can write to {here}"
        if not left:
            return "" if status.st_uid in (user, 0) else f"{here} belongs to another user"
        if (name := left.pop()) == "..":
            here = here.parent
            continue
        below = here / name
        if create and not os.path.lexists(below):
            os.mkdir(below, 0o700)
        status = os.lstat(below)
        if status.st_uid not in (user, 0) and (shared or status.st_uid != _unknown_user()):
            return f"{below} belongs to another user"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _LINKS:
                return f"{folder} has too many links"
            target = Path(os.readlink(below))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            here = Path("/") if target.is_absolute() else here
        else:
            here = below


def _unknown_user() -> int:
    """Return the user id that stands for all users outside this process's user namespace, such as the host's root in
    Apptainer; -1 when the namespace has every user."""
    try:
        everybody = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        return -1 if everybody else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return -1
