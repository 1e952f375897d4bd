"""Worker processes with deadlines: a call that hangs or breaks the protocol costs only its worker.

One thread runs an event loop that starts the workers, sends them calls and reads their messages.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, cast

from megagrpo.platform.process.cleanup.parent_death import kill_session
from megagrpo.platform.process.cleanup.removal import remove_tree
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.rewards.registry.reward_values import Parts, are_rewards, is_logged
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.workers.channel import Frames, ProtocolError, as_json, frame
from megagrpo.rewards.workers.output import Output

LOAD_SECONDS = 300.0  # timeout to start a worker and load the function; the call's own deadline starts after that
REPORT_SECONDS = 2.0  # time for a coroutine worker to report a call that it cancelled
SHARED = "shared"  # lane of the workers that take any call
SENT = ("action", "target", "options", "arguments", "timeout", "parts")  # of a `Call`, after its number
_numbers = itertools.count(1)  # of calls; no two workers get the same number
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class Call:
    """One call of a function in a worker of `lane`.

    `action` is "describe", "score" (called as a reward function), "row_faults" (its `row_fault` is called with each of
    `rows`) or "call" (called with exactly these arguments).
    """

    target: Target
    options: dict[str, Any] = field(default_factory=dict)  # of the function, or of its class's constructor
    action: str = "score"
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    lane: str = SHARED
    # of "score": what has a reward of its own in a completion ("turn" or "token"), and how many each completion has
    parts: Parts | None = None
    load_seconds: float = LOAD_SECONDS  # of the function, before `timeout` starts
    repeats: bool = True  # whether it runs again after its worker was lost, if another call may be the cause


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call. `kind` is "result", "error" (it raised, or its worker died), "invalid" (its result is no
    list of one value per completion) or "timeout"; `value` is the result or the error text."""

    kind: str
    value: Any
    seconds: float


@dataclass(eq=False)
class _Job:
    """A submitted call. An `alone` one retries a call that may have killed its worker: no call runs beside it."""

    call: Call
    future: Future[Outcome]
    alone: bool = False
    is_dropped: bool = False  # the worker has been told that it is cancelled
    begun: float = 0.0
    timer: asyncio.TimerHandle | None = None  # ends the worker at the call's deadline
    is_loaded: bool = False

    def end(self, outcome: Outcome) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_result(outcome)


@dataclass(frozen=True)
class Program:
    """What runs a worker: a Python, and a folder whose modules it can import."""

    python: str
    search_path: str | None


class _UnexpectedMessage(ProtocolError):
    """A message that belongs to no open call. A finished call may have sent it, so the open call is not to blame."""


class Worker(asyncio.Protocol):
    """One worker process with its own session and temporary folder, so killing it removes child processes and files.

    With a `capacity` it runs up to that many coroutines concurrently. Without one it runs plain functions in its main
    thread, one at a time. `retry` gets each call of a lost worker that may have been the cause or not.
    """

    def __init__(self, capacity: int | None, program: Program, retry: Callable[[_Job], None]):
        self._capacity, self._retry = capacity, retry
        self._running: dict[int, _Job] = {}
        self._frames, self._ended = Frames(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._killed = False
        self._folder = tempfile.mkdtemp(prefix="megagrpo_worker_")
        paths = [p for p in (_PACKAGE_ROOT, program.search_path, ENVIRONMENT.get("PYTHONPATH")) if p]
        self._output = Output("a reward worker")
        self._socket, theirs = socket.socketpair()
        self._transport: asyncio.Transport | None = None
        kind = "coroutines" if capacity else "functions"
        self.process = subprocess.Popen(
            [program.python, "-m", "megagrpo.rewards.workers.worker", kind, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output.writes,  # rewards' output must not mix with the trainer's own
            stderr=self._output.writes,
            env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TMPDIR": self._folder},
            start_new_session=True,
        )
        os.close(self._output.writes)  # the worker has its own copy
        theirs.close()
        self._loop.add_reader(self._output.fileno(), self._print)

    async def connect(self) -> Worker:
        """Open the connection to the process."""
        try:
            await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        except BaseException:
            self.kill()
            raise
        return self

    def _print(self) -> None:
        self._output.forward()
        if self._output.ended:
            self._loop.remove_reader(self._output.fileno())

    def is_usable(self) -> bool:
        """Whether the worker can take a call: it has not died, and has sent nothing although no call is open."""
        if self._running or self._killed or self._frames.is_partial:
            return bool(self._running)
        # its id stays taken until `kill`
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    async def running_at_most(self, count: int) -> None:
        """Wait until the worker runs no more than `count` calls."""
        while len(self._running) > count:
            self._ended.clear()
            await self._ended.wait()

    def start(self, job: _Job) -> None:
        """Send a call to the process. The call ends with an error when its arguments cannot be sent."""
        number, call = next(_numbers), job.call
        try:
            data = frame(as_json([number, *(getattr(call, name) for name in SENT)]))
        except (TypeError, ValueError, RecursionError) as error:
            return job.end(Outcome("error", f"its arguments cannot be sent to a worker: {error}", 0.0))
        self._running[number] = job
        self._set_deadline(job, call.load_seconds)
        assert self._transport is not None, "`connect` was called"
        self._transport.write(data)

    def _set_deadline(self, job: _Job, seconds: float) -> None:
        if job.timer is not None:
            job.timer.cancel()
        job.begun = time.monotonic()
        job.timer = self._loop.call_later(seconds, self._lose, "timeout", "no answer in time")

    # -- of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.add(data):
                self._take(message)
        except ProtocolError as error:
            reason = f"its worker broke the protocol: {error}"
            self._lose("error", reason, blames=not isinstance(error, _UnexpectedMessage))

    def connection_lost(self, _: Exception | None) -> None:
        self._lose("error")

    # --

    def _take(self, message: Any) -> None:
        """Process one message. Raises ProtocolError when it is not a valid message of a worker."""
        match message:
            case [int() as number, "started"] if number in self._running:
                job = self._running[number]
                if not job.is_loaded:
                    job.is_loaded = True
                    self._set_deadline(job, job.call.timeout + (REPORT_SECONDS if self._capacity else 0.0))
            case [int() as number, "result" | "error" | "invalid" | "timeout" as kind, value, float() as seconds] if (
                number in self._running
            ):
                call = self._running[number].call
                if not math.isfinite(seconds) or not (
                    _is_result_of(call, value) if kind == "result" else isinstance(value, str)
                ):
                    raise ProtocolError(f"it sent a malformed {kind}")
                self._pop(number).end(Outcome(kind, value, seconds))
            case _:
                raise _UnexpectedMessage("it sent a message that belongs to no open call")

    def _pop(self, number: int) -> _Job:
        job = self._running.pop(number)
        if job.timer is not None:
            job.timer.cancel()
        self._ended.set()
        return job

    def _lose(self, kind: str, reason: str = "", blames: bool = True) -> None:
        """Kill the worker. A call fails for `reason` if only this call can be the cause. Others run again, alone, if
        they can repeat.

        With `blames` False a finished call may be the cause, so only a call that runs alone fails.
        """
        if self._killed:
            return
        jobs = [self._pop(number) for number in list(self._running)]
        self.kill()
        for job in jobs:
            is_cause, died = len(jobs) == 1 and (blames or job.alone), f"({_exit_text(self.process.returncode)})"
            if is_cause:
                job.end(Outcome(kind, reason or f"the worker died {died}", time.monotonic() - job.begun))
            elif not job.call.repeats:
                job.end(
                    Outcome("error", f"the worker died {died} while it ran other calls", time.monotonic() - job.begun)
                )
            else:
                self._retry(_Job(job.call, job.future, alone=True))

    def drop(self) -> None:
        """Kill the worker if all calls that it runs are cancelled; else a worker of coroutines cancels those."""
        cancelled = [(number, job) for number, job in self._running.items() if job.future.cancelled()]
        if cancelled and len(cancelled) == len(self._running):
            self._lose("error", "cancelled")
        for number, job in cancelled if self._capacity and not self._killed else ():
            if not job.is_dropped and self._transport is not None:
                job.is_dropped = True
                self._transport.write(frame([number]))

    def kill(self) -> None:
        """Kill the process and its children, and remove its files. Safe to call twice."""
        if self._killed:
            return
        self._killed = True
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.abort()
        kill_session(self.process.pid)
        self.process.wait()
        self._loop.remove_reader(self._output.fileno())
        self._output.close()
        remove_tree(self._folder)


class WorkerPool:
    """Worker processes in lanes; a call runs in a worker of its lane, in the order of `submit`. `workers` is the size
    of the shared lane. Its methods may be called from any thread."""

    def __init__(self, workers: int, search_path: str | None = None, python: str | None = None):
        self._program = Program(python or sys.executable, search_path)
        self._lanes: dict[str, asyncio.Queue[_Job]] = {}
        self._workers: list[Worker] = []
        self._servers: list[asyncio.Task[None]] = []
        self._open: set[Future[Outcome]] = set()
        self._error: Exception | None = None
        self._loop = asyncio.new_event_loop()
        # The kernel kills a worker when the thread that started it ends.
        self._thread = Thread(target=self._loop.run_forever, name="reward workers", daemon=True)
        self._thread.start()
        try:
            self.add_lane(SHARED, workers)
        except BaseException:
            self.close()
            raise

    def add_lane(self, lane: str, workers: int = 1, capacity: int | None = None) -> None:
        """Add workers for the calls of `lane` only. With a `capacity` each runs up to that many coroutines at once."""
        self._await(self._add_lane(lane, workers, capacity))

    def submit(self, call: Call) -> Future[Outcome]:
        """Run a call. Cancelling the future drops the call; a worker that runs cancelled calls only is replaced.

        Raises ValueError when the pool is closed, and the error that ended it, if any.
        """
        future: Future[Outcome] = Future()
        self._open.add(future)
        if self._error is not None:  # looked at last: `_fail` sets it before it ends the open calls
            self._open.discard(future)
            raise self._error
        future.add_done_callback(self._forget)
        self._loop.call_soon_threadsafe(self._lanes[call.lane].put_nowait, _Job(call, future))
        return future

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run calls and return their outcomes, in order."""
        futures = [self.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:  # after an interrupt
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Kill all workers. Calls that have not ended raise ValueError. Safe to call twice."""
        if self._thread.is_alive():
            self._await(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _await[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _forget(self, future: Future[Outcome]) -> None:
        self._open.discard(future)
        if future.cancelled():
            self._loop.call_soon_threadsafe(self._drop)

    # -- in the event loop's thread

    def _drop(self) -> None:
        for worker in self._workers:
            worker.drop()

    async def _add_lane(self, lane: str, workers: int, capacity: int | None) -> None:
        calls = self._lanes.setdefault(lane, asyncio.Queue())
        for _ in range(workers):
            index = len(self._workers)
            self._workers.append(await Worker(capacity, self._program, calls.put_nowait).connect())
            self._servers.append(asyncio.create_task(self._serve(index, capacity, calls)))

    async def _serve(self, index: int, capacity: int | None, calls: asyncio.Queue[_Job]) -> None:
        """Start the calls of a lane in one worker, and replace the worker when it is lost."""
        try:
            while True:
                await self._workers[index].running_at_most((capacity or 1) - 1)
                job = await calls.get()
                if job.alone:
                    await self._workers[index].running_at_most(0)
                if job.future.cancelled():
                    continue
                if not self._workers[index].is_usable():
                    self._workers[index].kill()
                    self._workers[index] = await Worker(capacity, self._program, calls.put_nowait).connect()
                self._workers[index].start(job)
                if job.alone:
                    await self._workers[index].running_at_most(0)
        except Exception as error:
            self._fail(error)
        finally:
            self._workers[index].kill()

    def _fail(self, error: Exception) -> None:
        """End the pool: open and later calls raise `error`."""
        self._error = self._error or error
        for future in list(self._open):
            if future.set_running_or_notify_cancel():
                future.set_exception(self._error)

    async def _close(self) -> None:
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        self._fail(ValueError("the reward workers are closed"))


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _is_result_of(call: Call, value: Any) -> bool:
    """Whether a result has the shape that `call.action` requires."""
    match call.action, value:
        case "call", _:
            return True
        case "describe", dict():
            return True
        case "row_faults", list() as faults:
            return len(faults) == len(call.arguments["rows"]) and all(isinstance(f, str | None) for f in faults)
        case "score", [list() as rewards, logged]:
            count = len(call.arguments["completions"])
            return len(rewards) == count and are_rewards(rewards, call.parts) and is_logged(logged, count)
    return False
