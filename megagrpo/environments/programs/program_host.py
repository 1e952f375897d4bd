"""The part of a program's conversations in worker processes: each has a process of its own (`program_run`).

This module imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.environments.episodes.hosted import MALFORMED
from megagrpo.environments.programs.program_run import Program, live
from megagrpo.environments.programs.work_folder import PLACEHOLDER
from megagrpo.rewards.registry.reward_values import InvalidRewards, reward_of
from megagrpo.rewards.workers.channel import Channel, Frames, ProtocolError, as_json, frame
from megagrpo.rewards.workers.worker import flush

_READ_BYTES = 1 << 16


@dataclass(eq=False)
class _Process:
    """The process of a conversation, which waits for it on `connection`. `ended` ends with the process."""

    connection: socket.socket
    ended: asyncio.Task[None]
    timer: asyncio.TimerHandle | None = None  # of a warm one

    @property
    def is_waiting(self) -> bool:
        """Whether it has neither died nor sent a failure."""
        try:
            self.connection.recv_into(bytearray(1), 1, socket.MSG_PEEK)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False


class ProgramHost:
    """The coroutine function that a worker runs, at most `at_once` conversations at a time: those that still clean up
    count. `warm` processes beside them start their containers before they get a conversation, and end after
    `warm_seconds` without one. `columns` are the ones of a row that it needs, `socket_folder` is that of the address.
    Raises ValueError for a program or a file that is missing."""

    def __init__(
        self,
        program: dict[str, Any],
        columns: list[str],
        at_once: int,
        socket_folder: str = "",
        warm: int = 0,
        warm_seconds: float = 0.0,
    ):
        self._program, self.needs_columns = Program(**program), [(name,) for name in columns]
        self._slots, self._socket_folder = asyncio.Semaphore(at_once), socket_folder
        self._warm, self._warm_seconds = warm, warm_seconds
        self._waiting = deque[_Process]()  # warm processes
        self._dropped = set[asyncio.Task[None]]()  # ends of processes without a conversation
        for words in (self._program.container, self._program.start, self._program.stop):
            word = words[0] if words else ""
            word = self._program.command[0] if word == "{command}" else word
            is_relative = "/" in word and not word.startswith("/")  # to the work folder
            if word and not is_relative and not PLACEHOLDER.search(word) and not shutil.which(word):
                raise ValueError(f"no program `{word}` in PATH; install it, or write its path")
        for source in (*self._program.files.values(), *self._program.score_files.values()):
            if not PLACEHOLDER.search(source) and not Path(source).exists():
                raise ValueError(f"files: no file or folder {source}; correct the path")

        self._fill()

    async def __call__(self, client: dict[str, str], arguments: dict[str, Any]) -> dict[str, Any]:
        """Hold a conversation, and return what `_Conversation.hold` returns. Raises InvalidRewards with the reason of a
        failure."""
        begun = time.monotonic()
        await self._slots.acquire()
        process = self._taken()
        process.ended.add_done_callback(lambda _: self._slots.release())
        self._fill()
        try:
            with suppress(OSError):  # it has died, which the next line sees
                whole = frame([begun, client, as_json(arguments)])
                await asyncio.get_running_loop().sock_sendall(process.connection, whole)
            answer = await first_message(process.connection)
        finally:
            process.connection.close()  # the process sees it, and cleans up
        match answer:
            case {"failure": str() as failure, **rest} if not rest:
                raise InvalidRewards(failure)
            case {"value": float() | None as value, "ended": str(), "failure": str(), "outputs": dict()}:
                return answer | {"value": None if value is None else reward_of(value, "its reward is")}
        raise InvalidRewards("its process died" if answer is None else MALFORMED)

    def _taken(self) -> _Process:
        """Return the oldest warm process whose container has not failed, or a new process."""
        while self._waiting:
            process = self._waiting.popleft()
            if process.is_waiting:
                assert process.timer is not None, "a warm process has one"
                process.timer.cancel()
                return process
            self._drop(process)
        return self._new(is_warm=False)

    def _fill(self) -> None:
        """Start warm processes up to the limit, at once. Those that are ending count."""
        while len(self._waiting) + len(self._dropped) < self._warm:
            process = self._new(is_warm=True)
            process.timer = asyncio.get_running_loop().call_later(self._warm_seconds, self._expire, process)
            self._waiting.append(process)

    def _expire(self, process: _Process) -> None:
        self._waiting.remove(process)
        self._drop(process)

    def _drop(self, process: _Process) -> None:
        process.connection.close()
        if process.timer is not None:
            process.timer.cancel()
        self._dropped.add(process.ended)
        process.ended.add_done_callback(self._dropped.discard)

    def _new(self, is_warm: bool) -> _Process:
        ours, theirs = socket.socketpair()
        flush()
        if (pid := os.fork()) == 0:
            try:
                live(self._program, Channel(theirs, trusted=True), is_warm, self._socket_folder)
            finally:
                os._exit(0)  # the stack below is the worker's
        theirs.close()
        ours.setblocking(False)
        return _Process(ours, asyncio.create_task(_reaped(pid)))


async def _reaped(pid: int) -> None:
    """Wait for the end of a process, and reap it."""
    loop, ended, descriptor = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        os.waitpid(pid, 0)


async def first_message(connection: socket.socket) -> Any:
    """Return the message that comes first; None if the other side ends without one. Raises InvalidRewards for bytes
    that are no message."""
    loop, frames = asyncio.get_running_loop(), Frames()
    connection.setblocking(False)
    try:
        while data := await loop.sock_recv(connection, _READ_BYTES):
            for message in frames.add(data):
                return message
    except ProtocolError as error:
        raise InvalidRewards(f"its process broke the protocol: {error}") from None
    return None
