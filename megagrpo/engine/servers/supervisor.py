"""Runs one server, and ends it with all its child processes on a signal or when the trainer process is gone.

    python supervisor.py PARENT_PID GRACE_SECONDS COMMAND...

It also ends a server whose engine process has ended, when the API server stays for ENGINE_SECONDS.

When the trainer ends, even by SIGKILL, the kernel gives this process a new parent; it checks its parent ten times a
second. Orphaned descendants become its children (PR_SET_CHILD_SUBREAPER), so none escapes. It removes the server's
files in shared memory and the temporary directory, and temporary files of a killed trainer. From this project it
imports only modules of `process` that need nothing else, so it starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

PR_SET_CHILD_SUBREAPER = 36
VLLM_FILES = re.compile(r"/dev/shm/(?:psm_|vllm_|VLLM_|nccl-|sem\.mp-)[^/]+")  # files of vLLM, NCCL and multiprocessing
# of the temporary folder: vLLM makes sockets in it, with names of 36 characters
MAX_PATH_LENGTH = 107 - len("/vllm-12345678/") - 36
SERVER_GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
ENGINE = "::EngineCore"  # part of the title of vLLM's engine process
ENGINE_ENDED = 70  # exit code for a server that was killed because its engine had ended
# without an engine process, after which a server that had one is killed; a healthy API server exits sooner
ENGINE_SECONDS = 15.0


def main() -> int:
    """Return the server's exit status: 128 + the signal's number when it was killed, ENGINE_ENDED when this process
    killed it without an engine, 0 when this process ended it on a signal or because the trainer is gone."""
    # this file is run by its path, so the package is not importable
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from megagrpo.platform.process.cleanup.ownership import TEMPORARY, remove_if_left, remove_stale
    from megagrpo.platform.process.cleanup.parent_death import end_with_parent
    from megagrpo.platform.process.cleanup.removal import remove_own_file, remove_tree
    from megagrpo.platform.process.variables import ENVIRONMENT

    parent, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals: list[int] = []  # received so far
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: signals.append(received))
    supervisor = os.getpid()

    trainer_tmp = Path(tempfile.gettempdir())  # the trainer's temporary folder
    folder = tempfile.mkdtemp(prefix="vllm-", dir=trainer_tmp if len(str(trainer_tmp)) <= MAX_PATH_LENGTH else "/tmp")
    environment = {**ENVIRONMENT, "TMPDIR": folder}
    # the kernel kills the server with this process; parent_death.py ties the server's children to the server
    server = subprocess.Popen(command, env=environment, preexec_fn=lambda: end_with_parent(supervisor))
    files: dict[str, int] = {}  # path -> inode
    begun = scanned = time.monotonic()
    engine_seen, stuck = 0.0, False  # when an engine process was last seen; 0: never
    while server.poll() is None and not signals and os.getppid() == parent and not stuck:
        time.sleep(0.1)
        now = time.monotonic()
        # record mapped files regularly: once a server has died, its files are no longer mapped by any process
        if now - scanned > (5 if engine_seen and now - begun > 60 else 1):  # an engine may end soon after its start
            below = descendants()
            files |= shared_files(below)
            scanned = now
            engine_seen = now if has_engine(below) else engine_seen
            stuck = 0 < engine_seen < now - ENGINE_SECONDS
    status = server.poll()
    if stuck and status is None:
        # the log of a server that waited is not this process's; a server that has just ended has none
        with contextlib.suppress(OSError), open(f"/proc/{server.pid}/fd/1", "a") as log:
            log.write(
                f"the engine has ended and the API server has not exited within {ENGINE_SECONDS:g} s; killing it\n"
            )
        status = ENGINE_ENDED
    end(server, grace, files)
    if files:
        elsewhere = shared_files([int(entry) for entry in os.listdir("/proc") if entry.isdigit()])
        for file in files.keys() - elsewhere.keys():  # a file that another process maps is not only the server's
            remove_own_file(file, files[file])
    remove_stale()
    remove_tree(folder)
    if os.getppid() != parent:
        remove_if_left(trainer_tmp, TEMPORARY)
    return 0 if status is None else status if status >= 0 else 128 - status


def supervise(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start this file as a process of its own that runs `command`, with its output in `log`; `give` ends its input."""
    words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(SERVER_GRACE_SECONDS), *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, env=environment, stdin=pipe, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def give(supervisor: subprocess.Popen[bytes], text: str) -> None:
    """Write `text` to the input of a supervised command, and close it. The exit status of one that has ended tells
    why."""
    assert supervisor.stdin is not None, "stdin is a pipe"
    with contextlib.suppress(BrokenPipeError), supervisor.stdin:
        supervisor.stdin.write(text.encode())


def end(server: subprocess.Popen[bytes], grace: float, files: dict[str, int]) -> None:
    """Send SIGTERM to the server, then, after `grace` seconds, SIGKILL to all remaining descendants of this process.

    Adds to `files` the shared memory mapped until then: a starting server may create some after SIGTERM. SIGKILL goes
    to children only, whose process ids stay taken until `reap`. Their children become children of this process.
    """
    files |= shared_files(descendants())
    scanned = time.monotonic()
    deadline = scanned + grace
    if server.poll() is None:
        server.terminate()
    while (left := descendants()) and time.monotonic() < deadline:
        if time.monotonic() - scanned > 0.5:
            scanned = time.monotonic()
            files |= shared_files(left)
        reap()
        time.sleep(0.05)
        if server.poll() is not None:
            deadline = min(deadline, time.monotonic() + 1.0)
    immune: set[int] = set()  # children with another user's rights, such as sudo
    while children := set(descendants(levels=1)) - immune:
        files |= shared_files(descendants())
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                immune.add(pid)
        reap()
        time.sleep(0.02)


def reap() -> None:
    """Collect the exit status of children that ended, including adopted ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def descendants(levels: int = -1) -> list[int]:
    """Return the process ids of all living descendants of this process; with `levels=1` of its children."""
    from megagrpo.platform.process.cleanup.parent_death import living

    parents = {process.pid: process.parent for process in living()}
    pids, above = list[int](), {os.getpid()}
    while above and levels:
        above = {child for child, parent in parents.items() if parent in above}
        pids += above
        levels -= 1
    return pids


def contents(pids: list[int], name: str) -> Iterator[str]:
    """Yield the content of the file `name` in /proc of each of these processes that has not ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def has_engine(pids: list[int]) -> bool:
    """Whether one of the processes is vLLM's EngineCore."""
    return any(ENGINE in title for title in contents(pids, "cmdline"))


def shared_files(pids: list[int]) -> dict[str, int]:
    """Return path -> inode of vLLM's shared memory files that these processes map. A killed process leaves them."""
    lines = (line for maps in contents(pids, "maps") for line in maps.splitlines())
    fields = (line.split(maxsplit=5) for line in lines)  # addresses, rights, offset, device, inode, path
    return {
        path: int(inode) for *_, inode, path in fields if VLLM_FILES.fullmatch(path) and not path.endswith("(deleted)")
    }


if __name__ == "__main__":
    sys.exit(main())
