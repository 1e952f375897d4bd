"""The part of a program's conversations in worker processes: each has a process of its own (`program_run`).

This module imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from pathlib import Path
from typing import Any, NoReturn

from megagrpo.environments.episodes.hosted import MALFORMED
from megagrpo.environments.programs.program_run import Program, live
from megagrpo.environments.programs.work_folder import PLACEHOLDER
from megagrpo.rewards.registry.reward_values import InvalidRewards, reward_of
from megagrpo.rewards.workers.channel import Channel, Frames, ProtocolError
from megagrpo.rewards.workers.worker import flush

_READ_BYTES = 1 << 16


class ProgramHost:
    """The coroutine function that a worker runs, at most `at_once` conversations at a time: those that still clean up
    count. `columns` are those that the program needs. Raises ValueError for a program or a file that is missing."""

    def __init__(self, program: dict[str, Any], columns: list[str], at_once: int):
        self._program, self.needs_columns = Program(**program), [(name,) for name in columns]
        self._slots, self._endings = asyncio.Semaphore(at_once), set[asyncio.Task[None]]()
        for words in (self._program.container, self._program.start, self._program.stop):
            word = words[0] if words else ""
            word = self._program.command[0] if word == "{command}" else word
            is_relative = "/" in word and not word.startswith("/")  # to the work folder
            if word and not is_relative and not PLACEHOLDER.search(word) and not shutil.which(word):
                raise ValueError(f"no program `{word}` in PATH; install it, or write its path")
        for source in (*self._program.files.values(), *self._program.score_files.values()):
            if not PLACEHOLDER.search(source) and not Path(source).exists():
                raise ValueError(f"files: no file or folder {source}; correct the path")

    async def __call__(self, client: dict[str, str], arguments: dict[str, Any]) -> dict[str, Any]:
        """Hold a conversation, and return what `_Conversation.hold` returns. Raises InvalidRewards with the reason of a
        failure."""
        await self._slots.acquire()
        ours, theirs = socket.socketpair()
        flush()
        if (pid := os.fork()) == 0:
            self._live(Channel(theirs), client, arguments)
        theirs.close()
        try:
            answer = await first_message(ours)
        finally:
            ours.close()  # the process sees it, and cleans up
            ending = asyncio.create_task(self._ended(pid))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
        match answer:
            case {"failure": str() as failure, **rest} if not rest:
                raise InvalidRewards(failure)
            case {"value": float() | None as value, "ended": str(), "failure": str(), "outputs": dict()}:
                return answer | {"value": None if value is None else reward_of(value, "its reward is")}
        raise InvalidRewards("its process died" if answer is None else MALFORMED)

    def _live(self, channel: Channel, client: dict[str, str], arguments: dict[str, Any]) -> NoReturn:
        try:
            live(self._program, channel, client, arguments)
        finally:
            os._exit(0)  # the stack below is the worker's

    async def _ended(self, pid: int) -> None:
        """Wait for the end of a conversation's process, and reap it."""
        loop, ended, descriptor = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            os.waitpid(pid, 0)
            self._slots.release()


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
