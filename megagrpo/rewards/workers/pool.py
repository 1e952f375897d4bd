"""Worker processes with deadlines: a call that hangs or breaks the protocol costs only its worker."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megagrpo.platform.process.removal import remove_tree
from megagrpo.rewards.target import Target
from megagrpo.rewards.workers.call_log import is_logged
from megagrpo.rewards.workers.channel import Channel, ProtocolError, as_json
from megagrpo.rewards.workers.feed import Feed
from megagrpo.rewards.workers.output import Output

LOAD_SECONDS = 300.0  # timeout to start a worker and load the function; the call's own deadline starts after that
GRACE_SECONDS = 2.0  # time for a coroutine worker to report a call that it cancelled
SHARED = "shared"  # lane of the workers that take any call
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class Call:
    """One call of a function in a worker of `lane`.

    `action` is "describe", "score" (called as a reward function), "row_faults" (its `row_fault` is called with each of
    `rows`) or "call" (called with exactly these arguments). `tag` belongs to the caller.
    """

    target: Target
    options: dict[str, Any] = field(default_factory=dict)  # of the function, or of its class's constructor
    action: str = "score"
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    lane: str = SHARED
    tag: Any = None
    alone: bool = False  # run without other calls in the worker: a retry of a call that may have killed its worker


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call. `kind` is "result", "error" (it raised, or its worker died), "invalid" (its result is no
    list of one value per completion) or "timeout"; `value` is the result or the error text."""

    kind: str
    value: Any
    seconds: float


@dataclass
class _Running:
    call: Call
    begun: float
    deadline: float
    is_loaded: bool = False


class _UnexpectedMessage(ProtocolError):
    """A message that belongs to no open call. A finished call may have sent it, so the open call is not to blame."""


class Worker:
    """One worker process, with its own session and temporary folder, so that killing it also removes the reward's child
    processes and files.

    With a `capacity` it runs up to that many coroutines concurrently. Without one it runs plain functions in its main
    thread, one at a time.
    """

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
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._folder = tempfile.mkdtemp(prefix="megagrpo_worker_")
        paths = [p for p in (_PACKAGE_ROOT, self._search_path, os.environ.get("PYTHONPATH")) if p]
        kind = "coroutines" if self.capacity else "functions"
        self.output = Output("a reward worker")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megagrpo.rewards.workers.worker", kind, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.output.writes,  # rewards' output must not mix with the trainer's own
            stderr=self.output.writes,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TMPDIR": self._folder},
            start_new_session=True,
        )
        self.output.close_writer()
        theirs.close()

    def start(self, call: Call) -> list[tuple[Call, Outcome | None]]:
        """Start a call. Returns the call with an error outcome when its arguments cannot be sent."""
        if not self.running and self._is_dead_or_out_of_sync():
            self.restart()
        self._count += 1
        now = time.monotonic()
        try:
            self.channel.post(
                as_json([self._count, call.action, call.target, call.options, call.arguments, call.timeout])
            )
        except (TypeError, ValueError, RecursionError) as error:
            return [(call, Outcome("error", f"its arguments cannot be sent to a worker: {error}", 0.0))]
        self.running[self._count] = _Running(call, now, now + LOAD_SECONDS)
        return []

    def _is_dead_or_out_of_sync(self) -> bool:
        """Whether an idle worker has died, or has sent anything although no call is open."""
        try:
            # its id stays taken until `kill`
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return ended is not None or bool(self.channel.arrived()) or self.channel.has_half_a_message
        except (EOFError, ProtocolError):
            return True

    def receive(self) -> list[tuple[Call, Outcome | None]]:
        """Return the calls that are finished, each with its outcome.

        When the worker died or broke the protocol, all its calls are returned. An outcome of None means: unclear which
        call caused it, so the pool runs the call again without others.
        """
        over: list[tuple[Call, Outcome | None]] = []
        try:
            for message in self.channel.arrived():
                over += self._take(message)
        except EOFError:
            return over + self._lost()
        except _UnexpectedMessage as error:
            return over + self._lost(f"its worker broke the protocol: {error}", blames=False)
        except ProtocolError as error:
            return over + self._lost(f"its worker broke the protocol: {error}")
        return over

    def _take(self, message: Any) -> list[tuple[Call, Outcome]]:
        """Process one message. Raises ProtocolError when it is not a valid message of a worker."""
        match message:
            case [int() as number, "started"] if number in self.running:
                running = self.running[number]
                if not running.is_loaded:
                    running.is_loaded, running.begun = True, time.monotonic()
                    running.deadline = running.begun + running.call.timeout + (GRACE_SECONDS if self.capacity else 0.0)
                return []
            case [int() as number, "result" | "error" | "invalid" | "timeout" as kind, value, float() as seconds] if (
                number in self.running
            ):
                call = self.running[number].call
                if not math.isfinite(seconds) or not (
                    _is_result_of(call, value) if kind == "result" else isinstance(value, str)
                ):
                    raise ProtocolError(f"it sent a malformed {kind}")
                del self.running[number]
                return [(call, Outcome(kind, value, seconds))]
        raise _UnexpectedMessage("it sent a message that belongs to no open call")

    def _lost(self, reason: str = "", blames: bool = True) -> list[tuple[Call, Outcome | None]]:
        """Kill and respawn the worker. Returns its calls as failed for `reason`; see `_blame`."""
        lost = list(self.running.values())
        self.kill()
        reason = reason or f"the worker died ({_exit_text(self.process.returncode)})"
        self._spawn()
        return self._blame(lost, "error", reason, blames)

    def expire(self) -> list[tuple[Call, Outcome | None]]:
        """Restart the worker because a deadline has passed. Returns its calls, with outcomes as in `receive`."""
        lost = list(self.running.values())
        self.restart()
        return self._blame(lost, "timeout", "no answer in time")

    def _blame(
        self, lost: list[_Running], kind: str, reason: str, blames: bool = True
    ) -> list[tuple[Call, Outcome | None]]:
        """Return each lost call with its outcome: the failure if only this call can have caused it, else None.

        With `blames` False a finished call may have caused it, so only a call that runs `alone` fails.
        """
        now = time.monotonic()
        return [
            (r.call, Outcome(kind, reason, now - r.begun) if len(lost) == 1 and (blames or r.call.alone) else None)
            for r in lost
        ]

    def restart(self) -> None:
        self.kill()
        self._spawn()

    def kill(self) -> None:
        self.running = {}
        self.channel.close()
        try:
            # the group still exists while child processes of the reward run
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.output.close()
        remove_tree(self._folder)


class WorkerPool:
    """Worker processes in lanes; a call runs in a worker of its lane. `workers` is the size of the shared lane.

    Use it from one thread: the kernel kills a worker when the thread that started it ends.
    """

    def __init__(self, workers: int, search_path: str | None = None):
        self._search_path = search_path
        self._workers: list[Worker] = []
        self._pending: dict[str, deque[Call]] = {}
        self.add_lane(SHARED, workers)

    def add_lane(self, lane: str, workers: int = 1, capacity: int | None = None) -> None:
        """Add workers for the calls of `lane` only. With a `capacity` each worker runs up to that many coroutines
        concurrently."""
        self._workers += [Worker(lane, capacity, self._search_path) for _ in range(workers)]

    def run(
        self, calls: Iterable[Call], on_done: Callable[[Call, Outcome], Iterable[Call]], feed: Feed | None = None
    ) -> None:
        """Run all calls. `on_done` gets each outcome, in any order, and may return more calls to run.

        A `feed` supplies more calls until it raises FeedEnded, which this method propagates. Raises ValueError when the
        pool is closed.
        """
        if not self._workers:
            raise ValueError("the reward workers are closed")
        self._pending = {worker.lane: deque() for worker in self._workers}
        self._enqueue(calls)
        try:
            while any(self._pending.values()) or any(w.running for w in self._workers) or feed is not None:
                for worker in self._workers:
                    while self._pending[worker.lane] and worker.has_room(self._pending[worker.lane][0]):
                        self._end(worker.start(self._pending[worker.lane].popleft()), on_done)
                self._end(self._wait(feed), on_done)
                if feed is not None:
                    self._enqueue(feed.take())
        finally:  # after an interrupt, late results must not be taken for results of the next calls
            for worker in self._workers:
                if worker.running:
                    worker.restart()

    def drop(self, is_wanted: Callable[[Call], bool]) -> None:
        """Drop unwanted calls during `run`; called by `on_done` or the feed's `expand`.

        Calls that have not started are removed. Workers without any wanted call are restarted. Outcomes of other
        running calls still arrive.
        """
        for calls in self._pending.values():
            wanted = [call for call in calls if is_wanted(call)]
            calls.clear()
            calls.extend(wanted)
        for worker in self._workers:
            if worker.running and not any(is_wanted(running.call) for running in worker.running.values()):
                worker.restart()

    def _end(self, over: list[tuple[Call, Outcome | None]], on_done: Callable[[Call, Outcome], Iterable[Call]]) -> None:
        for call, outcome in over:
            self._enqueue([replace(call, alone=True)] if outcome is None else on_done(call, outcome))

    def _enqueue(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._pending[call.lane].append(call)

    def _wait(self, feed: Feed | None) -> list[tuple[Call, Outcome | None]]:
        """Wait for a result, a new item of the feed, or the next deadline. Returns finished calls; an outcome of None
        means to retry the call."""
        busy = [worker for worker in self._workers if worker.running]
        if not busy and feed is None:
            return []
        ready = self._ready(busy, feed, min((worker.deadline for worker in busy), default=math.inf))
        over = []
        for worker in self._workers:
            if worker.output.fileno() in ready:
                worker.output.forward()
        for worker in busy:
            if worker.channel.fileno() in ready:
                worker.channel.flush()
                over += worker.receive()
            if worker.running and time.monotonic() >= worker.deadline:
                over += worker.expire()
        return over

    def _ready(self, busy: list[Worker], feed: Feed | None, until: float) -> set[int]:
        """Wait until a worker responds, prints, or can take more of its call, or the feed has an item. Returns the
        ready descriptors."""
        watched = select.poll()
        for worker in self._workers:
            if not worker.output.ended:
                watched.register(worker.output.fileno(), select.POLLIN)
        for worker in busy:
            watched.register(
                worker.channel.fileno(), select.POLLIN | (select.POLLOUT if worker.channel.has_more_to_send else 0)
            )
        if feed is not None:
            watched.register(feed.connection.fileno(), select.POLLIN)
        left = None if until == math.inf else max(0, math.ceil(1000 * (until - time.monotonic())))
        return {descriptor for descriptor, _ in watched.poll(left)}

    def close(self) -> None:
        """Kill all workers. Safe to call twice."""
        while self._workers:
            self._workers.pop().kill()


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _is_result_of(call: Call, value: Any) -> bool:
    """Whether a result has the shape that `call.action` requires."""
    if call.action == "describe":
        return isinstance(value, dict)
    if call.action == "row_faults":
        rows = call.arguments["rows"]
        return (
            isinstance(value, list)
            and len(value) == len(rows)
            and all(isinstance(fault, str | None) for fault in value)
        )
    if call.action == "score":
        count = len(call.arguments["completions"])
        match value:
            case [list() as rewards, logged]:
                are_rewards = len(rewards) == count and all(
                    type(reward) in (float, str, type(None)) for reward in rewards
                )
                return are_rewards and is_logged(logged, count)
        return False
    return True
