"""Worker processes with deadlines: a call that hangs costs its worker, nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megagrpo.rewards.registry import Target

LOAD_SECONDS = 300.0  # to start a worker and import the function; the deadline of the call itself starts after that
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Call:
    """One call of a function in a worker. `action` is "describe" or "score"; `tag` is the caller's own."""

    target: Target
    action: str = "score"
    arguments: dict[str, Any] = field(default_factory=dict)
    tag: Any = None


@dataclass(frozen=True)
class Outcome:
    """`kind` is "result", "error" (raised, or its worker died) or "timeout"; `value` the result or the text of the error."""

    kind: str
    value: Any
    seconds: float


class Worker:
    """One process in a session of its own, so that killing it takes along what the reward started."""

    def __init__(self, search_path: str | None):
        self._search_path = search_path
        self.call: Call | None = None
        self._spawn()

    def _spawn(self) -> None:
        self.connection, theirs = Pipe()
        paths = [p for p in (_PACKAGE_ROOT, self._search_path, os.environ.get("PYTHONPATH")) if p]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megagrpo.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what rewards print must not mix with the trainer's own output
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()

    def start(self, call: Call, timeout: float) -> None:
        if self.process.poll() is not None:  # died while idle
            self.restart()
        self.call, self._timeout = call, timeout
        self._begun = time.monotonic()
        self.deadline = self._begun + LOAD_SECONDS
        try:
            self.connection.send((call.action, call.target.location, call.target.attribute, call.arguments))
        except (BrokenPipeError, ConnectionResetError):
            pass  # `receive` sees the end of the stream and reports it

    def receive(self) -> Outcome | None:
        """The outcome of the call, or None when the message only says that the function is loaded and running."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.kill()
            outcome = Outcome("error", f"the worker died ({_exit_text(self.process.returncode)})", time.monotonic() - self._begun)
            self._spawn()
            return outcome
        if message[0] == "started":
            self._begun = time.monotonic()
            self.deadline = self._begun + self._timeout
            return None
        self.call = None
        return Outcome(*message)

    def expire(self) -> Outcome:
        """Kill the worker because its deadline passed, and start another."""
        seconds = time.monotonic() - self._begun
        self.restart()
        return Outcome("timeout", f"no answer in {seconds:.1f} s", seconds)

    def restart(self) -> None:
        self.kill()
        self._spawn()

    def kill(self) -> None:
        self.call = None
        self.connection.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # the group outlives its leader while children of the reward run
        except ProcessLookupError:
            pass
        self.process.wait()


class WorkerPool:
    """`workers` processes. Use it from one thread: the kernel kills a worker when the thread that started it ends."""

    def __init__(self, workers: int, search_path: str | None = None):
        self._workers = [Worker(search_path) for _ in range(workers)]

    def __len__(self) -> int:
        return len(self._workers)

    def run(self, calls: Iterable[Call], timeout: float, on_done: Callable[[Call, Outcome], Iterable[Call]]) -> None:
        """Run all calls, `timeout` seconds each. `on_done` gets each outcome, in no order, and may return more calls to run."""
        if not self._workers:
            raise ValueError("the reward workers are closed")
        pending = deque(calls)
        try:
            while pending or any(w.call for w in self._workers):
                for worker in self._workers:
                    if worker.call is None and pending:
                        worker.start(pending.popleft(), timeout)
                for call, outcome in self._wait():
                    pending.extend(on_done(call, outcome))
        finally:  # an interrupt: answers still under way must not be taken for answers to the next calls
            for worker in self._workers:
                if worker.call is not None:
                    worker.restart()

    def _wait(self) -> list[tuple[Call, Outcome]]:
        """Wait for an answer or the next deadline; the calls that are over."""
        busy = {w.connection: w for w in self._workers if w.call is not None}
        until = min(w.deadline for w in busy.values())
        ready = wait(list(busy), timeout=max(0.0, until - time.monotonic()))
        done = []
        for connection, worker in busy.items():
            call = worker.call
            if connection in ready:
                outcome = worker.receive()
            elif time.monotonic() >= worker.deadline:
                outcome = worker.expire()
            else:
                continue
            if outcome is not None:
                done.append((call, outcome))
        return done

    def close(self) -> None:
        """Kill all workers. Safe to call twice."""
        while self._workers:
            self._workers.pop().kill()


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
