"""Runs one server and ends it with everything it started, when asked to or when the process that launched it is gone.

    python supervisor.py PARENT_PID GRACE_SECONDS COMMAND...

Whatever kills the trainer, SIGKILL included, the kernel gives this process a new parent; it looks ten times a second. Descendants whose own
parent died become children of this process (PR_SET_CHILD_SUBREAPER), so none escapes. What the server leaves in shared memory and among
temporary files goes with it; so do the temporary files of a trainer that was killed. It imports nothing of this project but `scratch`: it
must start at once and stay small.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED = "/dev/shm/"
VLLM_FILES = ("psm_", "vllm_")
SCRATCH = "megagrpo_tmp_"  # begins the name of a trainer's own temporary folder (scratch.py)
LONGEST = 107 - len("/vllm-12345678/") - 36  # of a temporary folder: vLLM makes sockets there, with names of 36 characters
ENGINE = b"::EngineCore"  # in the title of vLLM's process that computes
ENGINE_SECONDS = 15.0  # without an engine, after which a server that had one is ended; a sound API server exits before that


def main() -> int:
    """Exit status of the server, 128 + the signal's number when it was killed; 0 when it was stopped from here."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # this file runs by its path
    from megagrpo.process.scratch import remove_tree

    parent, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append(1))
    own = os.getpid()

    def tie() -> None:
        """In the server's process: the kernel kills it when this one is killed. Its children are tied to it by parent_death.py."""
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own:
            os._exit(1)

    around = Path(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="vllm-", dir=around if len(str(around)) <= LONGEST else "/tmp")
    environment = {**os.environ, "TMPDIR": folder}
    server = subprocess.Popen(command, env=environment, preexec_fn=tie)
    files: set[str] = set()
    begun = seen = time.monotonic()
    engine_seen, stuck = 0.0, False  # when there was an engine last; 0: never yet
    while server.poll() is None and not asked and os.getppid() == parent and not stuck:
        time.sleep(0.1)
        now = time.monotonic()
        if now - seen > (1 if now - begun < 60 else 5):  # what a server that dies by itself has left, nobody maps any more
            below = descendants()
            files |= shared_files(below)
            seen = now
            engine_seen = now if has_engine(below) else engine_seen
            stuck = 0 < engine_seen < now - ENGINE_SECONDS
    status = server.poll()
    if stuck and status is None:
        print(f"the engine has ended and the API server has not exited within {ENGINE_SECONDS:g} s; killing it", flush=True)
        status = -signal.SIGKILL
    files |= shared_files(descendants())
    end(server, grace)
    for file in files:
        Path(file).unlink(missing_ok=True)
    remove_tree(folder)
    if os.getppid() != parent:
        if around.name.startswith(SCRATCH):
            remove_tree(around)
    return 0 if status is None else status if status >= 0 else 128 - status


def end(server: subprocess.Popen, grace: float) -> None:
    """SIGTERM to the server, then, after `grace` seconds, SIGKILL to whatever is left below this process."""
    deadline = time.monotonic() + grace
    if server.poll() is None:
        server.terminate()
    while descendants() and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)
        if server.poll() is not None:
            deadline = min(deadline, time.monotonic() + 1.0)
    while left := descendants():
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        reap()
        time.sleep(0.02)


def reap() -> None:
    """Collect children that ended, adopted ones too."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def descendants() -> list[int]:
    """Living processes below this one."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, ppid = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry)] = int(ppid)
    found, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        below = [child for child, ppid in parents.items() if ppid == pid]
        found += below
        todo += below
    return found


def has_engine(pids: list[int]) -> bool:
    """Whether one of the processes is vLLM's EngineCore."""
    for pid in pids:
        try:
            if ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
        except OSError:
            pass
    return False


def shared_files(pids: list[int]) -> set[str]:
    """vLLM's files in shared memory that these processes have mapped; a process that is killed leaves them behind."""
    files = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        paths = (line.partition(SHARED)[2] for line in lines)
        files |= {SHARED + path for path in paths if path.startswith(VLLM_FILES) and not path.endswith("(deleted)")}
    return files


if __name__ == "__main__":
    sys.exit(main())
