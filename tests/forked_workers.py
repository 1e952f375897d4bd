"""Processes of pytest-xdist as forks of one process that has imported the slow packages once for all of them.

`install` in the process that shares out the tests lets execnet start its Python processes so. The process that forks
has no thread and no test module. It ends with pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import warnings
from typing import Any

# What most test files import at last. The first one prepares torch and Megatron-Core for this machine.
SLOW = ("megagrpo.platform.device", "megatron.core", "transformers.generation", "datasets", "hypothesis")
SLOW += ("transformers.models.auto.tokenization_auto", "megagrpo.policy.megatron_policy", "megagrpo.trainer.wiring")


class Forked:
    """Like the `subprocess.Popen` of a Python with pipes, as far as execnet uses it."""

    def __init__(self, forks: socket.socket):
        (theirs, stdin), (stdout, mine) = os.pipe(), os.pipe()
        socket.send_fds(forks, [b"fork"], [theirs, mine])
        os.close(theirs)
        os.close(mine)
        self.stdin, self.stdout = open(stdin, "wb"), open(stdout, "rb")
        self.pid = int(json.loads(forks.recv(100)))
        self._ended = os.pidfd_open(self.pid)

    def wait(self) -> int:
        select.select([self._ended], [], [])
        return 0

    def kill(self) -> None:
        signal.pidfd_send_signal(self._ended, signal.SIGKILL)


def install() -> None:
    """Start the process that forks, and let execnet use it."""
    from execnet import gateway_base, gateway_io

    forks, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(process.wait)
    atexit.register(forks.close)

    def start(self: Any, args: Any, execmodel: Any) -> None:
        self.popen = Forked(forks)
        gateway_base.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster.__init__ = start  # type: ignore[method-assign]


def serve(requests: socket.socket) -> None:
    """Fork for each request. A fork returns, with the pipes as standard input and output."""
    while True:
        message, pipes, _, _ = socket.recv_fds(requests, 100, 2)
        if not message:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()  # the CPU seconds of forks belong to `make test`
            os._exit(0)
        with warnings.catch_warnings(
            action="ignore"
        ):  # torch keeps two idle threads from its import; no test needs them
            pid = os.fork()
        if pid == 0:
            break
        for pipe in pipes:
            os.close(pipe)
        requests.sendall(json.dumps(pid).encode())
    requests.close()
    random.seed()  # forks would choose the same ports
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)


if __name__ == "__main__":
    sys.path[0] = ""  # as in a Python that execnet starts
    from megagrpo.platform.process.imports import without_garbage_collection

    with without_garbage_collection(), warnings.catch_warnings(action="ignore"):
        for name in SLOW:
            importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = ["-c"]
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
