"""Counts the threads and files that a sandboxed program creates: the kernel asks this process before each one (seccomp user notification).

A call's flags are in registers, so the program cannot change them after the check. The kernel drops a request whose process has died.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct

from megagrpo.rewards.sandbox.system_calls import ARCHITECTURES, CLONE, EDQUOT

EAGAIN = 11
NOTIF_RECV, NOTIF_SEND, FLAG_CONTINUE = 0xC0502100, 0xC0182101, 1
_QUESTION, _ANSWER = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI")  # struct seccomp_notif and seccomp_notif_resp


class Counts:
    """Answers the requests of process `pid`: up to `max_threads` at a time, up to `max_files` creations in total. A context manager.

    `mailbox` is the socket through which the process sends the listener. `fileno()` is the mailbox until then, and the listener afterwards.
    """

    def __init__(self, mailbox: socket.socket, pid: int, max_threads: int, max_files: int):
        self._mailbox, self._pid, self._max_threads, self._files_left = mailbox, pid, max_threads, max_files
        self._listener: int | None = None
        self._clone = CLONE[ARCHITECTURES.get(os.uname().machine, (0, 0))[1]]
        self._starting: set[int] = set()  # threads whose new thread may not exist yet

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 when closed."""
        return self._mailbox.fileno() if self._listener is None else self._listener

    def __enter__(self) -> Counts:
        return self

    def __exit__(self, *_: object) -> None:
        self._mailbox.close()
        if self._listener is not None:
            os.close(self._listener)

    def answer(self) -> bool:
        """Receive the listener or answer one call; call this when `fileno()` is readable. Returns False when no more calls come."""
        if self._listener is None:
            _, descriptors, _, _ = socket.recv_fds(self._mailbox, 64, 1)
            self._listener = next(iter(descriptors), None)
            return self._listener is not None
        question = bytearray(_QUESTION.size)
        try:
            fcntl.ioctl(self._listener, NOTIF_RECV, question)
            number, thread, _, call, *_ = _QUESTION.unpack(question)
            error = self._thread(thread) if call == self._clone else self._file()
            fcntl.ioctl(self._listener, NOTIF_SEND, _ANSWER.pack(number, 0, -error, 0 if error else FLAG_CONTINUE))
        except OSError:  # the process died, or a signal ended the call
            return not self._is_hung_up()
        return True

    def _is_hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def _thread(self, asking: int) -> int:
        """Return 0 or the error for a thread that starts another. A thread that asks again has finished starting its previous one."""
        try:
            alive = {int(entry) for entry in os.listdir(f"/proc/{self._pid}/task")}
        except OSError:
            return EAGAIN
        self._starting = (self._starting & alive) - {asking}
        if len(alive) + len(self._starting) >= self._max_threads:
            return EAGAIN
        self._starting.add(asking)
        return 0

    def _file(self) -> int:
        """Return 0 or the error for a call that can create a file."""
        if self._files_left <= 0:
            return EDQUOT
        self._files_left -= 1
        return 0
