"""Ties a process to its parent: the kernel sends it a signal when the parent ends, even by SIGKILL (PR_SET_PDEATHSIG of Linux).

Imports of the standard library only: callers run this before anything slow.
"""

from __future__ import annotations

import ctypes
import os
import signal

LAUNCHER_VARIABLE = "MEGAGRPO_LAUNCHER_PID"  # the launcher sets it to its process id before it starts ranks
PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send signal `number` to this process when its parent, process `parent`, ends.

    Sends the signal at once if the parent ended before this call. The kernel watches the thread that started this process: that thread
    must live as long as the parent.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_torchrun() -> None:
    """Have the kernel send SIGTERM to this rank when torchrun ends.

    SIGTERM ends a rank that is still starting; a rank that trains saves and stops. Does nothing without torchrun. The launcher names its
    process id, so a torchrun killed before this call counts too.
    """
    launcher = os.environ.pop(LAUNCHER_VARIABLE, None)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(int(launcher) if launcher else os.getppid(), signal.SIGTERM)
