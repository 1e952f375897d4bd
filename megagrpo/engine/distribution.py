"""Distribution of prompts over the servers of a fleet, until every prompt has its responses or no server is left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from megagrpo.engine.http import HEALTH_SECONDS, answers
from megagrpo.engine.protocol import EngineStarved
from megagrpo.engine.updates import LOOK_SECONDS, Updates
from megagrpo.types import Prompt, SamplingParams

WAKE_SECONDS = 0.02  # between two looks for free slots, and for the end of all jobs
WATCH_SECONDS = 2.0  # between two health checks of a server that works on prompts
REASSIGN_SECONDS = 30.0  # without a passed health check, after which a server's prompts go to other servers

Choices = list[dict[str, Any]]  # vLLM's responses to one prompt


@dataclass
class Job:
    """A request for one prompt: the prompt's index in the call, its body, the weight version at its creation, how it
    samples, and the number of failed attempts."""

    index: int
    prompt: Prompt
    body: dict[str, Any]
    version: int
    sampling: SamplingParams
    failures: int = 0


class Generation:
    """One call of `generate`. Each server works on up to `slots` jobs at once; a free slot takes the next job. Jobs are
    distributed over the servers in turn.

    `respond` returns a server's choices for a job, or None when the job must be retried. `deliver` takes the choices.
    `begun` is called when servers work on all prompts and have room.

    When a server stops serving, its jobs go to other servers. With the fleet's `patience`, servers that return are used
    again. The servers are those of the fleet at construction, although `follow` may be called meanwhile.
    """

    def __init__(
        self,
        engine: Updates,
        client: httpx.AsyncClient,
        jobs: deque[Job],
        slots: int,
        respond: Callable[[Generation, str, Job], Awaitable[Choices | None]],
        deliver: Callable[[str, Job, Choices], None],
        begun: Callable[[], None],
    ):
        self._engine, self._fleet, self.client, self._jobs, self._slots = engine, engine.fleet, client, jobs, slots
        self._respond, self._deliver, self._begun = respond, deliver, begun
        self._urls = self._fleet.urls if self._fleet.patience else engine.serving()
        self._undelivered = len(jobs)  # jobs whose choices were not delivered yet
        self._busy = Counter[str]()  # server -> slots that work on a job
        self._timeouts: dict[str, set[asyncio.Timeout]] = defaultdict(set)  # server -> those of its requests

    async def run(self) -> None:
        """Work off all jobs. Raises EngineDeadError when no server is left, EngineStarved if all left need weights."""
        recovery = [self._await_servers(), self._watch()] if self._fleet.patience else []
        await gather([self._dispatch(), *recovery])
        if self._undelivered:
            raise self._engine.dead_error()

    @contextlib.asynccontextmanager
    async def deadline(self, url: str) -> AsyncIterator[None]:
        """Run one request to the server under the engine's timeout, however slowly the response drips. Raises
        TimeoutError when the time is over, or when the server has not passed a health check for too long."""
        async with asyncio.timeout(self._engine.request_timeout) as limit:
            self._timeouts[url].add(limit)
            try:
                yield
            finally:
                self._timeouts[url].discard(limit)

    def _usable(self) -> list[str]:
        return self._fleet.usable(self._urls)

    def _report_if_begun(self) -> None:
        if not self._jobs and self._busy.total() < self._slots * len(self._usable()):
            self._begun()

    async def _dispatch(self) -> None:
        """Give jobs to free slots until all are delivered, or no server is left and none may return."""
        async with asyncio.TaskGroup() as slots:
            while self._undelivered and (self._fleet.patience or self._usable()):
                url = min(self._usable(), key=self._busy.__getitem__, default=None)
                if url is not None and self._jobs and self._busy[url] < self._slots:
                    self._busy[url] += 1
                    slots.create_task(self._work_off(url, self._jobs.popleft()))
                else:
                    await asyncio.sleep(WAKE_SECONDS)

    async def _work_off(self, url: str, job: Job | None) -> None:
        """Work off a job on one slot of the server, and then others while the server is usable."""
        while job is not None:
            self._report_if_begun()
            choices = await self._respond(self, url, job)
            if choices is None:
                self._jobs.append(job)
            else:
                self._deliver(url, job, choices)
                self._undelivered -= 1
            job = self._jobs.popleft() if self._jobs and self._fleet.usable([url]) else None
        self._busy[url] -= 1
        self._report_if_begun()

    async def _await_servers(self) -> None:
        """Report servers that return. Raises the errors of `run` when no server serves for too long."""
        silent_since = time.monotonic()
        while self._undelivered:
            for url in self._fleet.returning(self._urls):
                await self._engine.report_if_ready(self.client, url)
            if self._usable():
                silent_since = time.monotonic()
            elif not self._engine.refills and any([await answers(self.client, url) for url in self._urls]):
                names = ", ".join(map(self._engine.name, self._urls))
                raise EngineStarved(f"{names}: none has weight version {self._engine.weight_version}")
            elif time.monotonic() - silent_since >= self._fleet.patience:
                raise self._engine.dead_error()
            await pause(LOOK_SECONDS, lambda: not self._undelivered)

    async def _watch(self) -> None:
        """Report servers that do not respond, and end their requests."""
        heard: dict[str, float] = {}  # server -> when it passed a health check last, or was not expected to
        while self._undelivered:
            urls, began = self._usable(), time.monotonic()
            healthy = await gather([answers(self.client, url) for url in urls])
            # this process was starved of CPU, so silence proves nothing
            starved = time.monotonic() - began > HEALTH_SECONDS + 1
            usable = self._fleet.usable(urls)
            for url, passed in zip(urls, healthy, strict=True):
                now = time.monotonic()
                if passed or starved or url not in usable:
                    heard[url] = now
                elif now - heard.setdefault(url, now) > REASSIGN_SECONDS:
                    self._fleet.silent(url)
                    for limit in [*self._timeouts[url]]:
                        limit.reschedule(asyncio.get_running_loop().time())
            await pause(WATCH_SECONDS, lambda: not self._undelivered)


def stream[T](work: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]) -> Generator[T]:
    """Run the coroutine `work(put)` in an event loop, and yield each value that it puts. Raises the error of `work`.

    The event loop runs only while the caller waits for the next value. Closing the iterator cancels `work`.
    """
    with asyncio.Runner() as runner:
        values: asyncio.Queue[tuple[T] | None] = asyncio.Queue()  # None: `work` has ended
        task = runner.get_loop().create_task(work(lambda value: values.put_nowait((value,))))
        task.add_done_callback(lambda _: values.put_nowait(None))
        while (item := runner.run(values.get())) is not None:
            yield item[0]
        task.result()


async def pause(seconds: float, over: Callable[[], bool]) -> None:
    """Sleep for `seconds`, or until `over` returns True."""
    ends = time.monotonic() + seconds
    while not over() and time.monotonic() < ends:
        await asyncio.sleep(WAKE_SECONDS)


async def gather[T](coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return results in order. If one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in tasks]
