"""Containers that a killed run has left: their names tell which process has started them, and whether it has ended.

This module imports the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megagrpo.environments.programs.work_folder import filled
from megagrpo.platform.process.cleanup.ownership import TEMPORARY, owner_in, remove_left

_SECONDS = 60.0  # of a command
_AT_ONCE = 8  # containers that are removed


def shared_folder(temporary: Path) -> Path:
    """Return the folder of the machine's temporary files, of which a process may have a folder for itself."""
    return temporary.parent if owner_in(temporary.name, TEMPORARY) else temporary


def container_name(folder: Path) -> str:
    """Return the name of the container of the process that has `folder`, which is locked while the process lives. It
    begins with a digest of the folder around: processes with another one may be alive and not be seen."""
    return _prefix(folder.parent) + hashlib.blake2b(folder.name.encode(), digest_size=6).hexdigest()


def remove_left_containers(
    names: Sequence[str], stop: Sequence[str], environment: Mapping[str, str], around: Path
) -> tuple[int, list[str]]:
    """Run `stop` for the containers that the command `names` prints and whose processes, which had their folders in
    `around`, have ended. Returns their number, and the names of those that are still there. Raises ValueError when
    `names` fails."""
    listed = _listed(names, environment, _prefix(around))
    remove_left(around, TEMPORARY)  # after the list: a container that is on it had its folder before
    left = [*set(listed) - {container_name(folder) for folder in around.glob(f"{TEMPORARY}*")}]

    def run(name: str) -> None:
        _run([filled(word, {"name": name}) for word in stop], environment)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(run, left))
    return len(left), sorted(set(left) & set(_listed(names, environment, _prefix(around)))) if left else []


def _listed(command: Sequence[str], environment: Mapping[str, str], prefix: str) -> list[str]:
    status, text = _run(command, environment)
    if status:
        raise ValueError(f"ended with exit code {status}: {text.strip()[-400:]}; correct the command")
    return [word for word in text.split() if word.startswith(prefix)]


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Return the exit code of a command and what it has printed; 124 for one that is late."""
    null, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    try:
        done = subprocess.run(command, env=environment, stdin=null, stdout=pipe, stderr=both, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return 124, f"no end after {_SECONDS:g} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode(errors="replace")


def _prefix(around: Path) -> str:
    status = os.stat(around)
    place = f"{status.st_dev} {status.st_ino} {os.geteuid()}"
    return f"megagrpo-{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}-"
