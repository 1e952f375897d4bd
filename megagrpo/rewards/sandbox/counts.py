"""Counts what a sandboxed program takes of the kernel: the kernel asks this process before each counted call (seccomp
user notification).

A call's numbers are in registers, so the program cannot change them later. The kernel drops a dead process's request.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct

from megagrpo.rewards.sandbox import system_calls
from megagrpo.rewards.sandbox.system_calls import ARCHITECTURES, EDQUOT, ENOMEM

EAGAIN = 11
NOTIF_RECV, NOTIF_SEND, FLAG_CONTINUE = 0xC0502100, 0xC0182101, 1
_QUESTION, _ANSWER = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI")  # struct seccomp_notif and seccomp_notif_resp
_PAGE = os.sysconf("SC_PAGE_SIZE")
# bytes of addresses that one page table covers, for each level of tables
_SPANS = [_PAGE * (_PAGE // 8) ** level for level in range(1, 5)]
_MAPPING, _LOCK = 1024, 256  # bytes that the kernel takes for a mapping and a file lock, rounded up


class Counts:
    """Answers the requests of process `pid`. A context manager.

    Allows `max_threads` at a time, `max_files` creations in total, and `max_kernel` bytes of kernel memory at a time:
    page tables and records of mappings, buffers of sockets, file locks. `mailbox` is the socket through which the
    process sends the listener. `fileno()` is the mailbox until then, and the listener afterwards.
    """

    def __init__(self, mailbox: socket.socket, pid: int, max_threads: int, max_files: int, max_kernel: int):
        self._mailbox, self._pid, self._max_threads, self._files_left = mailbox, pid, max_threads, max_files
        self._listener: int | None = None
        self._starting: set[int] = set()  # threads whose new thread may not exist yet
        self._max_kernel, self._kernel_left, self._lock_bytes = max_kernel, 0, 0
        self._taking: dict[int, int] = {}  # thread -> bytes of its last allowed call, which may not have run yet
        self._socket_bytes = mailbox.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        column = ARCHITECTURES.get(os.uname().machine, (0, 0))[1]
        names = ("CLONE", "FCNTL", "SOCKETPAIR", "MMAP", "MUNMAP", "MREMAP", "MPROTECT")
        self._names = {getattr(system_calls, name)[column]: name for name in names}

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
        """Receive the listener or answer one call, when `fileno()` is readable. Returns False if no more calls come."""
        if self._listener is None:
            _, descriptors, _, _ = socket.recv_fds(self._mailbox, 64, 1)
            self._listener = next(iter(descriptors), None)
            return self._listener is not None
        question = bytearray(_QUESTION.size)
        try:
            fcntl.ioctl(self._listener, NOTIF_RECV, question)
            number, thread, _, call, _, _, *arguments = _QUESTION.unpack(question)
            error = self._decide(thread, self._names.get(call), arguments)
            fcntl.ioctl(self._listener, NOTIF_SEND, _ANSWER.pack(number, 0, -error, 0 if error else FLAG_CONTINUE))
        except OSError:  # the process died, or a signal ended the call
            return not self._is_hung_up()
        return True

    def _decide(self, thread: int, name: str | None, arguments: list[int]) -> int:
        """Return 0 or the error for a call. A call without a name can create a file."""
        match name:
            case None:
                return self._file()
            case "CLONE":
                return self._thread(thread)
            case "FCNTL":
                self._lock_bytes += _LOCK  # never given back, so the kernel need not be asked for locks
                return self._kernel_memory(thread, _LOCK)
            case "SOCKETPAIR":
                return self._kernel_memory(thread, 2 * self._socket_bytes)
            case "MMAP" | "MREMAP":
                tables = sum(arguments[2 if name == "MREMAP" else 1] // span + 2 for span in _SPANS)
                return self._kernel_memory(thread, tables * _PAGE + 2 * _MAPPING)
        # MUNMAP or MPROTECT split a mapping in three at most. Where memory was unmapped, the stack or the heap can grow
        # by as much.
        return self._kernel_memory(thread, 2 * _MAPPING + 2 * _PAGE * arguments[1] // _SPANS[0], frees=name == "MUNMAP")

    def _kernel_memory(self, asking: int, most: int, frees: bool = False) -> int:
        """Return 0 or the error for a call that takes at most `most` bytes of kernel memory. Measures only when such
        calls since the last measurement could pass the limit. The last 1/32 is for calls that free memory."""
        needed = most if frees else most + self._max_kernel // 32
        self._taking.pop(asking, None)
        if needed > self._kernel_left:
            try:
                alive = {int(entry) for entry in os.listdir(f"/proc/{self._pid}/task")}
                self._taking = {thread: taken for thread, taken in self._taking.items() if thread in alive}
                self._kernel_left = self._max_kernel - self._measured() - self._lock_bytes - sum(self._taking.values())
            except OSError:
                return ENOMEM
            if needed > self._kernel_left:
                return ENOMEM
        self._kernel_left -= most
        self._taking[asking] = most
        return 0

    def _measured(self) -> int:
        """Return the bytes of kernel memory that the process can fill now: the page tables that its mappings need when
        every page is touched, the records of mappings, and the buffers of its open sockets."""
        total, last = 0, [-1] * len(_SPANS)
        with open(f"/proc/{self._pid}/maps", "rb") as maps:
            for line in maps:
                start, _, end = line.partition(b" ")[0].partition(b"-")
                lowest, highest = int(start, 16), int(end, 16) - 1
                total += _MAPPING
                for level, span in enumerate(_SPANS):
                    if highest // span == last[level]:
                        break  # the previous mapping needs this table and those above it
                    total += _PAGE * (highest // span - max(last[level], lowest // span - 1))
                    last[level] = highest // span
        folder = f"/proc/{self._pid}/fd/"
        return total + self._socket_bytes * sum(
            os.readlink(folder + name).startswith("socket:") for name in os.listdir(folder)
        )

    def _is_hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def _thread(self, asking: int) -> int:
        """Return 0 or the error for a thread starting another. One that asks again has started its previous one."""
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
