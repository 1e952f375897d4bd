"""Worker processes with deadlines: a call that hangs costs its worker, nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megagrpo.rewards.feed import Feed
from megagrpo.rewards.registry import Target
from megagrpo.scratch import remove_tree

LOAD_SECONDS = 300.0  # to start a worker and load the function; the deadline of the call itself starts after that
GRACE_SECONDS = 2.0  # within which a worker of coroutines reports one that it has cancelled
SHARED = "shared"  # the lane of the workers that take any call
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Call:
    """One call of a function in a worker of `lane`. `action` is "describe", "score" (as a reward function is called) or "call" (with just
    these arguments); `tag` is the caller's own."""

    target: Target
    options: dict[str, Any] = field(default_factory=dict)  # of the function, or of its class's constructor
    action: str = "score"
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    lane: str = SHARED
    tag: Any = None
    alone: bool = False  # beside no other in its worker: it may be the one that cost the last worker


@dataclass(frozen=True)
class Outcome:
    """`kind` is "result", "error" (raised, or its worker died) or "timeout"; `value` the result or the text of the error."""

    kind: str
    value: Any
    seconds: float


@dataclass
class _Running:
    call: Call
    begun: float
    deadline: float


class Worker:
    """One process in a session of its own with a folder of its own for temporary files, so that killing it takes along what the reward
    started and wrote there.

    With a `capacity` it runs coroutines, so many at once; without one plain functions in its main thread, one after the other."""

    def __init__(self, lane: str, capacity: int | None, search_path: str | None):
        self.lane, self.capacity, self._search_path = lane, capacity, search_path
        self.running: dict[int, _Running] = {}
        self._count = 0
        self._spawn()

    def has_room(self, call: Call) -> bool:
        """Whether `call` may start now."""
        if call.alone or any(r.call.alone for r in self.running.values()):
            return not self.running
        return len(self.running) < (self.capacity or 1)

    @property
    def deadline(self) -> float:
        return min(running.deadline for running in self.running.values())

    def _spawn(self) -> None:
        self.connection, theirs = Pipe()
        self._folder = tempfile.mkdtemp(prefix="megagrpo_worker_")
        paths = [p for p in (_PACKAGE_ROOT, self._search_path, os.environ.get("PYTHONPATH")) if p]
        kind = "coroutines" if self.capacity else "functions"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megagrpo.rewards.worker", kind, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what rewards print must not mix with the trainer's own output
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TMPDIR": self._folder},
            start_new_session=True,
        )
        theirs.close()

    def start(self, call: Call) -> None:
        if not self.running and self.process.poll() is not None:  # died while idle
            self.restart()
        self._count += 1
        now = time.monotonic()
        self.running[self._count] = _Running(call, now, now + LOAD_SECONDS)
        try:
            self.connection.send((self._count, call.action, call.target, call.options, call.arguments, call.timeout))
        except (BrokenPipeError, ConnectionResetError):
            pass  # `receive` sees the end of the stream and reports it

    def receive(self) -> list[tuple[Call, Outcome | None]]:
        """The call that is over, with its outcome; nothing when the message only says that a function is loaded and running; all calls
        when the worker died, with None where it may have been another's fault."""
        try:
            number, kind, *answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._lost()
        running = self.running[number]
        if kind == "started":
            running.begun = time.monotonic()
            running.deadline = running.begun + running.call.timeout + (GRACE_SECONDS if self.capacity else 0.0)
            return []
        del self.running[number]
        return [(running.call, Outcome(kind, *answer))]

    def _lost(self) -> list[tuple[Call, Outcome | None]]:
        lost = list(self.running.values())
        self.kill()
        reason = f"the worker died ({_exit_text(self.process.returncode)})"
        self._spawn()
        return self._blame(lost, "error", reason)

    def expire(self) -> list[tuple[Call, Outcome | None]]:
        """Kill the worker because a deadline passed, and start another; its calls, with None where it may have been another's fault."""
        lost = list(self.running.values())
        self.restart()
        return self._blame(lost, "timeout", "no answer in time")

    def _blame(self, lost: list[_Running], kind: str, reason: str) -> list[tuple[Call, Outcome | None]]:
        now = time.monotonic()
        return [(r.call, Outcome(kind, reason, now - r.begun) if len(lost) == 1 else None) for r in lost]

    def restart(self) -> None:
        self.kill()
        self._spawn()

    def kill(self) -> None:
        self.running = {}
        self.connection.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # the group outlives its leader while children of the reward run
        except ProcessLookupError:
            pass
        self.process.wait()
        remove_tree(self._folder)


class WorkerPool:
    """Worker processes in lanes; a call goes to the workers of its lane. `workers` are those of the shared lane.

    Use it from one thread: the kernel kills a worker when the thread that started it ends."""

    def __init__(self, workers: int, search_path: str | None = None):
        self._search_path = search_path
        self._workers: list[Worker] = []
        self._pending: dict[str, deque[Call]] = {}
        self.add_lane(SHARED, workers)

    def add_lane(self, lane: str, workers: int = 1, capacity: int | None = None) -> None:
        """More workers, for the calls of `lane` only. With a `capacity` each runs coroutines, so many at once."""
        self._workers += [Worker(lane, capacity, self._search_path) for _ in range(workers)]

    def size(self, lane: str) -> int:
        """How many workers a lane has."""
        return sum(worker.lane == lane for worker in self._workers)

    def run(self, calls: Iterable[Call], on_done: Callable[[Call, Outcome], Iterable[Call]], feed: Feed | None = None) -> None:
        """Run all calls. `on_done` gets each outcome, in no order, and may return more calls to run. A `feed` brings more, until it raises
        Ended, which this passes on."""
        if not self._workers:
            raise ValueError("the reward workers are closed")
        self._pending = {worker.lane: deque() for worker in self._workers}
        self._enqueue(calls)
        try:
            while any(self._pending.values()) or any(w.running for w in self._workers) or feed is not None:
                for worker in self._workers:
                    while self._pending[worker.lane] and worker.has_room(self._pending[worker.lane][0]):
                        worker.start(self._pending[worker.lane].popleft())
                for call, outcome in self._wait(feed):
                    self._enqueue([replace(call, alone=True)] if outcome is None else on_done(call, outcome))
                if feed is not None:
                    self._enqueue(feed.take())
        finally:  # an interrupt: answers still under way must not be taken for answers to the next calls
            for worker in self._workers:
                if worker.running:
                    worker.restart()

    def drop(self, is_wanted: Callable[[Call], bool]) -> None:
        """In the middle of `run`, by `on_done` or what the feed expands: forget calls that are not wanted and have not begun, and free the
        workers that run none that is. Outcomes of others that are under way still come."""
        for calls in self._pending.values():
            wanted = [call for call in calls if is_wanted(call)]
            calls.clear()
            calls.extend(wanted)
        for worker in self._workers:
            if worker.running and not any(is_wanted(running.call) for running in worker.running.values()):
                worker.restart()

    def _enqueue(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._pending[call.lane].append(call)

    def _wait(self, feed: Feed | None) -> list[tuple[Call, Outcome | None]]:
        """Wait for an answer, more work or the next deadline; the calls that are over, or (None) to be called again."""
        busy = {w.connection: w for w in self._workers if w.running}
        until = min((w.deadline for w in busy.values()), default=None)
        watched = [*busy, *([feed.connection] if feed is not None else [])]
        ready = wait(watched, timeout=None if until is None else max(0.0, until - time.monotonic()))
        over = []
        for connection, worker in busy.items():
            if connection in ready:
                over += worker.receive()
            elif time.monotonic() >= worker.deadline:
                over += worker.expire()
        return over

    def close(self) -> None:
        """Kill all workers. Safe to call twice."""
        while self._workers:
            self._workers.pop().kill()


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
