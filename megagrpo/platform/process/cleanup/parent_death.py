"""Ties processes together: the kernel signals a process when its parent ends, even by SIGKILL (Linux
PR_SET_PDEATHSIG), and a session has a guard that kills what its leader leaves.

Imports the standard library only, because callers run this before any slow import.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import parent_process
from pathlib import Path
from typing import NamedTuple

from megagrpo.platform.process.environment import under_torchrun
from megagrpo.platform.process.variables import ENVIRONMENT, LAUNCHER_VARIABLE

PR_SET_PDEATHSIG = 1
_PASSES = 100  # over the processes of a session
_DEATH = signal.SIGUSR1  # what the kernel sends to a guard when its parent has ended


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


class Living(NamedTuple):
    """A process that has not ended, with its parent and its session."""

    pid: int
    parent: int
    session: int


def living() -> Iterator[Living]:
    """Yield the living processes of this machine."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # the name of a program in parentheses may contain anything
            fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                yield Living(int(entry), int(fields[1]), int(fields[3]))


def guard_session(descriptor: int) -> None:
    """Fork the guard of this process's session: it kills processes that user code has started and this process leaves.
    It closes its copy of the connection `descriptor`."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {_DEATH})
    worker = os.getpid()
    if os.fork() == 0:
        try:
            _guard(worker, descriptor)
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _guard(worker: int, descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of a job that ends
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)  # the pool kills the worker's process group
    end_with_parent(worker, _DEATH)
    os.close(descriptor)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    signal.sigwait({_DEATH})
    kill_session(os.getsid(0))


def kill_session(session: int) -> None:
    """Kill the living processes of a session, except for this one."""
    for _ in range(_PASSES):  # user code may start others meanwhile; what the kernel cannot end is left
        if not (left := [p.pid for p in living() if p.session == session and p.pid != os.getpid()]):
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
