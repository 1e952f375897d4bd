"""Hands a server to a process that waits for it: a line of JSON on the process's standard input names the server's log
and arguments.

The line has an end of its own, because a fork of the sender can hold the pipe open. Imports the standard library only,
for the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import IO, Any


def send(data: bytes, pipe: IO[bytes] | None) -> None:
    """Write `data` to a process's standard input, and close it. A process that has ended reads nothing, and its exit
    status tells so."""
    assert pipe is not None, "stdin is a pipe"
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(data)


def line_of(server: dict[str, Any]) -> bytes:
    """Return the line that `receive` reads."""
    return json.dumps(server).encode() + b"\n"


def receive() -> dict[str, Any] | None:
    """Wait for the line, redirect this process's output to the end of the file in its `log`, and return it. Bytes after
    the line stay in the pipe. Return None when the sender has ended or closed the pipe."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    server: dict[str, Any] = json.loads(line)
    log = os.open(server["log"], os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    return server
