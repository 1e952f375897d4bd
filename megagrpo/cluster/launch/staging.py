"""Copies a job's Python environment to each node's own disk. It imports no package. Run it once per node:

    python -m megagrpo.cluster.launch.staging --archive env.tar --into /local/megagrpo_env.17 [--running "12 17"]
    python -m megagrpo.cluster.launch.staging --remove /local/megagrpo_env.17

A rank opens thousands of small files before it trains. On a file system that all nodes share, a thousand ranks open
millions at once. An archive is one file that each node reads once, from start to end.

The name of the copy ends in its job's number. Copies of this user whose jobs are not `--running` are removed first: a
job that was killed could not remove its own. If nodes share the disk, the first one unpacks. With a problem the exit
code is 1, and the problem is printed as `key: problem; fix`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import socket
import subprocess
from pathlib import Path

from megagrpo.platform.process.cleanup.ownership import open_lock
from megagrpo.platform.process.cleanup.removal import remove_own_file, remove_tree
from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT

NAME = "megagrpo_env."  # the number of the job follows
TAR, SQUASH = (".tar",), (".sqsh", ".squashfs")
SPARE_BYTES = 2**30  # free disk space after unpacking, for temporary files and caches of compiled code


def stage(archive: Path, into: Path, running: list[str]) -> None:
    """Unpack `archive` to the folder `into`, unless it is there. Raises ValueError with the key and the fix."""
    for job in {left.name.removeprefix(NAME).partition(".")[0] for left in into.parent.glob(f"{NAME}*")}:
        if job not in running:
            unstage(into.with_name(f"{NAME}{job}"))
    part, lock = Path(f"{into}.part"), None
    try:
        lock = open_lock(Path(f"{into}.lock"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.lexists(into):
            if into.is_symlink() or into.stat().st_uid != os.geteuid():
                raise ValueError(f"staging.folder: {into} belongs to another user; name a folder of your own")
            return
        remove_tree(part, owner=os.geteuid())
        part.mkdir(mode=0o700)
        _check_space(archive, into.parent)
        _run(_unpack(archive, part), f"staging.archive: {archive} cannot be unpacked to {part}")
        why = f"staging.archive: {archive} must hold an environment with bin/python at its top"
        _run([f"{part}/bin/python", "-c", "import site"], why)
        part.chmod(0o700)  # the archive has the mode of its own top folder
        part.rename(into)
    except OSError as error:
        raise ValueError(f"staging.folder: {into.parent}: {error}; name a folder on each node's disk") from error
    finally:
        remove_tree(part, owner=os.geteuid())
        if lock is not None:
            os.close(lock)


def unstage(folder: Path) -> None:
    """Remove a copy of this user with what unpacking may have left."""
    remove_tree(folder, owner=os.geteuid())
    remove_tree(f"{folder}.part", owner=os.geteuid())
    remove_own_file(f"{folder}.lock")


def _check_space(archive: Path, folder: Path) -> None:
    """Raise ValueError when the unpacked archive would leave less than `SPARE_BYTES` of disk space."""
    size = archive.stat().st_size
    if archive.suffix in SQUASH:
        listed = _run(["unsquashfs", "-lln", str(archive)], f"staging.archive: {archive} cannot be read")
        size = sum(int(line.split()[2]) for line in listed.splitlines() if line.startswith("-"))
    if (free := shutil.disk_usage(folder).free) < size + SPARE_BYTES:
        raise ValueError(
            f"staging.folder: {folder} has {free / 2**30:.1f} GiB free, and the environment needs "
            f"{(size + SPARE_BYTES) / 2**30:.1f}; name another folder, or leave packages out of the archive"
        )


def _unpack(archive: Path, folder: Path) -> list[str]:
    if archive.suffix in SQUASH:
        return ["unsquashfs", "-quiet", "-no-progress", "-force", "-dest", str(folder), str(archive)]
    return ["tar", "--extract", "--no-same-owner", f"--file={archive}", f"--directory={folder}"]


def _run(command: list[str], why: str) -> str:
    """Return the output of a command. Raises ValueError with `why` when it fails or is missing."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()[-1:] or [str(error)]
        raise ValueError(f"{why}: {said[0]}; make the archive again") from error
    except FileNotFoundError as error:
        missing = f"{error.filename} not found"
        raise ValueError(f"{why}: {missing}; install it on every node, or make the archive again as .tar") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help=f"a file that ends in {', '.join(TAR + SQUASH)}")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--running", default="", help="numbers of this user's jobs that have not ended")
    parser.add_argument("--remove", type=Path)
    options = parser.parse_args(arguments)
    if options.remove is not None:
        unstage(options.remove)
        return 0
    try:
        stage(options.archive, options.into, [*options.running.split(), options.into.name.removeprefix(NAME)])
    except ValueError as error:
        warn(f"staging: {ENVIRONMENT.get('SLURMD_NODENAME', socket.gethostname())}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
