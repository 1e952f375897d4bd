"""Ends the processes of episodes: an environment may `close`, and then the kernel kills all that is left.

A worker ends its episodes itself. Its guard ends those of a worker that has died, also by the SIGKILL of a run: a
process of its own session that knows the episodes' process groups. This module imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import NoReturn

_READ_BYTES = 1 << 16
_FORGET = -1  # the second number of a line to the guard about an episode that has ended


async def end_group(pid: int, number: int, seconds: float) -> None:
    """Send the signal `number` (0: none) to a process, wait until it ends, at most `seconds`, and kill all processes of
    its group. The caller reaps it."""
    descriptor = os.pidfd_open(pid)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        os.kill(pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        kill_group(pid)


def kill_group(pid: int) -> None:
    """Kill a process, and the others of its group if it has created one. It may have ended."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


class Guard:
    """The worker's end of the pipe to its guard. `in_child` runs in the guard, to close what it has inherited."""

    def __init__(self, seconds: float, in_child: Callable[[], None]):
        reads, self._writes = os.pipe()
        if os.fork() == 0:
            os.setsid()  # it outlives its worker's process group
            os.close(self._writes)
            in_child()
            _watch(reads, seconds)
        os.close(reads)

    def add(self, pid: int, number: int) -> None:
        """Have the guard end a process by the signal `number` (0: none) when this worker dies."""
        os.write(self._writes, b"%d %d\n" % (pid, number))

    def remove(self, pid: int) -> None:
        """Forget a process, before it is reaped."""
        os.write(self._writes, b"%d %d\n" % (pid, _FORGET))

    def close(self) -> None:
        """Close a forked process's copy of the pipe. The guard sees the worker's end when all copies are closed."""
        os.close(self._writes)


def _watch(reads: int, seconds: float) -> NoReturn:
    """Wait for the end of the worker, and then end the processes that it has added and not removed."""
    signals: dict[int, int] = {}
    rest = b""
    while data := os.read(reads, _READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for pid, number in (map(int, line.split()) for line in lines):
            signals[pid] = number
            if number == _FORGET:
                del signals[pid]
    running = select.poll()
    for pid, number in signals.items():
        with contextlib.suppress(ProcessLookupError):
            running.register(os.pidfd_open(pid), select.POLLIN)
            os.kill(pid, number)
    left, ends = len(signals), time.monotonic() + seconds
    while left and (ended := running.poll(max(0.0, ends - time.monotonic()) * 1000)):
        for descriptor, _ in ended:
            running.unregister(descriptor)
        left -= len(ended)
    for pid in signals:
        kill_group(pid)
    os._exit(0)
