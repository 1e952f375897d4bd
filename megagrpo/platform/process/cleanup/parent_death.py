"""Ties a process to its parent: the kernel signals it when the parent ends, even by SIGKILL (Linux PR_SET_PDEATHSIG).

Imports the standard library only, because callers run this before any slow import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from multiprocessing import parent_process

from megagrpo.platform.process.environment import under_torchrun
from megagrpo.platform.process.variables import ENVIRONMENT, LAUNCHER_VARIABLE

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send signal `number` to this process when its parent, process `parent`, ends.

    Sends the signal at once if the parent ended before this call. The kernel watches the thread that started this
    process: that thread must live as long as the parent.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_torchrun() -> None:
    """Have the kernel send SIGTERM to this rank when torchrun ends.

    SIGTERM ends a rank that is still starting; a rank that trains saves and stops. Does nothing without torchrun. The
    launcher names its process id, so a torchrun killed before this call counts too.
    """
    launcher = ENVIRONMENT.pop(LAUNCHER_VARIABLE, None)  # no child inherits it
    if under_torchrun(ENVIRONMENT):
        end_with_parent(int(launcher) if launcher else os.getppid(), signal.SIGTERM)


# one entry: whether the fork under way is one of the main thread; empty before `tie_process_tree`
_tied: list[bool] = []


def tie_process_tree() -> None:
    """Have the kernel kill this process with its parent if `multiprocessing` started it, and every later fork of its
    main thread. Forks of other threads are left alone: the kernel would kill them when that thread ends.

    vLLM's plug-in calls this in each process. A second call does nothing, nor does a call in a fork already tied.
    """
    if _tied:
        return
    _tied.append(False)
    parent = parent_process()
    if parent is not None and parent.pid is not None:
        end_with_parent(parent.pid)
    own_id: list[int] = [0]

    def before() -> None:
        _tied[0], own_id[0] = threading.current_thread() is threading.main_thread(), os.getpid()

    def in_child() -> None:
        if _tied[0]:
            end_with_parent(own_id[0])

    os.register_at_fork(before=before, after_in_child=in_child)
