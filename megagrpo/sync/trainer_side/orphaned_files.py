"""Removes files in shared memory when the process that published weights there ends by SIGKILL, even with supervisors.

    python orphaned_files.py PARENT_PID FOLDER

Besides the folder of the weights, it removes the segments of servers that ended with the parent. The process has a
session of its own, so a signal to the trainer's process group does not reach it. It looks at its parent five times a
second. Until the parent has ended it imports the standard library only: it must start at once and stay small.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

PERIOD = 0.2  # seconds between two looks at the parent
# fewest and most removals, one each period: servers and other ranks end a little later than the parent
NUM_REMOVALS = range(10, 50)


def remove_when_orphaned(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process for `folder`. The caller kills it after it has removed the folder itself."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def main(parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        time.sleep(PERIOD)
    # this file is run by its path, so the package is not importable
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from megagrpo.platform.process.cleanup.shm_names import remove_stale

    for attempt in range(NUM_REMOVALS.stop):
        remove_stale(folder.parent)
        time.sleep(PERIOD)
        if attempt >= NUM_REMOVALS.start and not folder.exists():
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
