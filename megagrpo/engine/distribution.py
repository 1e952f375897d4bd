"""Distribution of prompts over the servers of a fleet, until every prompt has its responses or no server is left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from megagrpo.engine.http import HEALTH_SECONDS, answers
from megagrpo.engine.protocol import EngineStarved
from megagrpo.engine.updates import LOOK_SECONDS, Updates
from megagrpo.types import Prompt, SamplingParams

WAKE_SECONDS = 0.02  # between two looks for prompts that wait for a server
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
    """One call of `generate`. Each server works on up to `slots` jobs at once; a free slot takes the next job.

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
        self._busy = 0  # slots that work on a job
        self._timeouts: dict[str, set[asyncio.Timeout]] = defaultdict(set)  # server -> those of its requests
        self._jobs_waiting = asyncio.Event()  # pulsed by `_wake`; free slots wait for it

    async def run(self) -> None:
        """Work off all jobs. Raises EngineDeadError when no server is left, EngineStarved when all remaining servers
        need weights."""
        slots = min(self._slots, len(self._jobs))
        # prompts are distributed over the servers in turn
        work = [self._serve(url) for _ in range(slots) for url in self._urls]
        recovery = [self._await_servers(), self._watch()] if self._fleet.patience else []
        await gather([*work, self._wake(), *recovery])
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
        if not self._jobs and self._busy < self._slots * len(self._usable()):
            self._begun()

    async def _serve(self, url: str) -> None:
        """Work off jobs on one slot of the server."""
        while self._undelivered and (self._fleet.patience or self._fleet.usable([url])):
            # another server may still return its prompts, and this server may recover
            if not self._jobs or not self._fleet.usable([url]):
                await self._jobs_waiting.wait()
                continue
            job = self._jobs.popleft()
            self._busy += 1
            self._report_if_begun()
            choices = await self._respond(self, url, job)
            self._busy -= 1
            if choices is None:
                self._jobs.append(job)
                continue
            self._report_if_begun()
            self._deliver(url, job, choices)
            self._undelivered -= 1

    async def _wake(self) -> None:
        """Wake free slots when there are jobs for them."""
        while self._undelivered and (self._fleet.patience or self._usable()):
            if self._jobs and self._usable():
                self._jobs_waiting.set()  # wakes every waiting `_serve` once
                self._jobs_waiting.clear()
            await asyncio.sleep(WAKE_SECONDS)
        self._jobs_waiting.set()

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


async def pause(seconds: float, over: Callable[[], bool]) -> None:
    """Sleep for `seconds`, or until `over` returns True."""
    ends = time.monotonic() + seconds
    while not over() and time.monotonic() < ends:
        await asyncio.sleep(WAKE_SECONDS)


async def gather[T](coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results in order. When one fails, cancel the others and raise
    its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
