"""Removes a folder in shared memory when the process that published weights in it ends by SIGKILL, even together with its supervisors.

    python orphaned_folder.py PARENT_PID FOLDER

The process has a session of its own, so a signal to the trainer's process group does not reach it. It looks at its parent five times a
second. Imports of the standard library only: it must start at once and stay small.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PERIOD = 0.2  # seconds between two looks at the parent
ATTEMPTS = 50  # to remove the folder, one each period: ranks that end later than the parent may still write to it


def remove_when_orphaned(folder: Path) -> subprocess.Popen:
    """Start the process for `folder`. The caller kills it after it has removed the folder itself."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def main(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(PERIOD)
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(PERIOD)
        if not os.path.exists(folder):
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
