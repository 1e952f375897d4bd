"""Adapters from a trainer on another host: a worker keeps them in its host's shared memory, where vLLM reads them."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
from pathlib import Path

from megagrpo.platform.process.cleanup.ownership import FOLDER, OWNER_LOCK, SHARED_MEMORY, open_lock, owner_in
from megagrpo.platform.process.cleanup.removal import remove_tree

_locks: dict[Path, int] = {}  # folder of a trainer -> the descriptor of its lock


def store(owner: str, adapter: str, unused: list[str], name: str, data: str, last: bool) -> None:
    """Append `data`, in base64, to the file `name` of an adapter, which appears complete with the `last` part.

    The adapter is the folder `adapter` in the folder `owner`, named as on the trainer's host. The `unused` adapters are
    removed. Every worker of a host writes the same file. Raises OSError when it cannot, ValueError for another name.
    """
    if not owner_in(owner, FOLDER) or any(os.sep in part or part.startswith(".") for part in (adapter, name, *unused)):
        raise ValueError(f"{owner}/{adapter}/{name} is no name of an adapter's file")
    folder = SHARED_MEMORY / owner
    _hold(folder)
    for other in unused:
        remove_tree(folder / other)
    (folder / adapter).mkdir(exist_ok=True)
    part = folder / adapter / f".{name}.{os.getpid()}"
    with part.open("ab") as file:
        file.write(base64.b64decode(data))
    if last:
        part.replace(folder / adapter / name)


def _hold(folder: Path) -> None:
    """Create `folder` and lock it while this process lives: the next start on this host removes it afterwards, see
    `ownership.py`. Folders of earlier trainers are removed."""
    if folder in _locks:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = open_lock(folder / OWNER_LOCK)
    with contextlib.suppress(OSError):  # the trainer is on this host, and has locked it
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()}\n".encode())
    while _locks:
        earlier, held = _locks.popitem()
        remove_tree(earlier)
        os.close(held)
    _locks[folder] = lock
