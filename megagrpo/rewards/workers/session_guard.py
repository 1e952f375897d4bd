"""A process beside each worker that kills what the worker leaves: processes that user code has started.

A worker has a session of its own. The kernel kills the worker with the trainer, and episodes and agents, which it has
forked, with the worker, but not the processes that these have started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from megagrpo.platform.process.cleanup.parent_death import end_with_parent

_PASSES = 100  # over the processes of a session
_DEATH = signal.SIGUSR1  # what the kernel sends when the worker has ended


def guard_session(descriptor: int) -> None:
    """Fork the guard of this process's session. It closes its copy of the connection `descriptor`."""
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
        if not (left := _members(session)):
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _members(session: int) -> list[int]:
    """Return the ids of the living processes of a session, except for this one."""
    found = list[int]()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
                found += [int(entry)] if int(stat[3]) == session and stat[0] not in "ZX" else []
    return found
