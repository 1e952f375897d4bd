"""Distribution of requests over the servers of a fleet, until every response has come or no server is left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import httpx

from megagrpo.engine.connections import Connections
from megagrpo.engine.http import HEALTH_SECONDS, answers
from megagrpo.engine.protocol import EngineStarved
from megagrpo.engine.requests import Request
from megagrpo.engine.server_slots import QUEUE_ROUTE, Slots, read_queue
from megagrpo.engine.updates import LOOK_SECONDS, Updates
from megagrpo.types import Rollout

WAKE_SECONDS = 0.02  # between two looks for servers with free slots
QUEUE_SECONDS = 0.5  # between two looks at the waiting queue of a server
WATCH_SECONDS = 2.0  # between two health checks of a server that works on requests
REASSIGN_SECONDS = 30.0  # without a passed health check, after which a server's requests go to other servers
THREAD_BYTES = 1 << 16  # of a body: a longer one is read in a thread
READING_THREADS = 2


@dataclass(eq=False)
class Tools:
    """What a generation works with: clients for health checks and for requests, a thread pool that reads bodies, the
    slots of each server, and this client's number, by which clients begin with different servers."""

    client: httpx.AsyncClient
    connections: Connections
    threads: ThreadPoolExecutor
    slots: Slots
    number: int = 0


class Generation:
    """One call of `generate`: one request per response. `Slots` says how many a server has at once.

    A group begins on the server with the fewest requests. All requests of the group go to that server, whose prefix
    cache then holds the prompt. Another server takes one of them only if it has a free slot, no group is left to begin,
    and the group's own server has none free: then it takes the last one of the longest rest. Results do not depend on
    it.

    `respond` returns a server's rollout for a request, or None when the request must be retried. `deliver` takes the
    rollout. `begun` is called when servers work on all requests and have room.

    When a server stops serving, its requests go to other servers. With the fleet's `patience`, servers that return are
    used again. The servers are those of the fleet at construction, although `follow` may be called meanwhile.
    """

    def __init__(
        self,
        engine: Updates,
        tools: Tools,
        groups: Iterable[Sequence[Request]],
        respond: Callable[[Generation, str, Request], Awaitable[Rollout | None]],
        deliver: Callable[[Request, Rollout], None],
        begun: Callable[[], None],
    ):
        self._engine, self._fleet, self.tools, self._slots = engine, engine.fleet, tools, tools.slots
        self._respond, self._deliver, self._begun = respond, deliver, begun
        urls = self._fleet.urls if self._fleet.patience else engine.serving()
        self._urls = urls[tools.number % len(urls) :] + urls[: tools.number % len(urls)]
        self._groups = deque(map(deque, groups))  # groups that no server has begun, and rests of groups
        self._rests: dict[str, deque[Request]] = {}  # server -> the rest of the group that it has begun
        self._waiting = sum(map(len, self._groups))  # requests that no server has
        self._undelivered = self._waiting
        self._delivered = asyncio.Event()  # all of them
        self._busy = Counter[str]()  # server -> its requests
        self._shared: dict[tuple[object, str], asyncio.Future[bool]] = {}

    async def run(self) -> None:
        """Work off all requests. Raises EngineDeadError when no server is left, EngineStarved if all left need
        weights."""
        beside = [self._follow_queues(), self.tools.connections.follow_moves()]
        beside += [self._await_servers(), self._watch()] if self._fleet.patience else []
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(coroutine) for coroutine in beside]
            await self._dispatch()
            for task in background:
                task.cancel()
        if self._undelivered:
            raise self._engine.dead_error()

    async def shared(self, check: Callable[[httpx.AsyncClient, str], Coroutine[None, None, bool]], url: str) -> bool:
        """Return the result of `check` on the server. Requests that ask at once share one check: thousands may fail
        together."""
        if (key := (check, url)) not in self._shared:
            running = self._shared[key] = asyncio.ensure_future(check(self.tools.client, url))
            running.add_done_callback(lambda _: self._shared.pop(key))
        return await asyncio.shield(self._shared[key])

    async def read[T](self, size: int, read: Callable[[], T]) -> T:
        """Return `read()`, of a body of `size` bytes: in a thread if it takes long."""
        if size < THREAD_BYTES:
            return read()
        return await asyncio.get_running_loop().run_in_executor(self.tools.threads, read)

    def _usable(self) -> list[str]:
        return self._fleet.usable(self._urls)

    async def _dispatch(self) -> None:
        """Give requests to free slots until all are delivered, or no server is left and none may return."""
        async with asyncio.TaskGroup() as self._tasks:
            while self._undelivered and (self._fleet.patience or self._usable()):
                self._fill()
                with suppress(TimeoutError):
                    async with asyncio.timeout(WAKE_SECONDS):
                        await self._delivered.wait()

    def _fill(self) -> None:
        """Give free slots their next requests. First a server's slots are filled, then its waiting queue."""
        usable = self._usable()
        for url in self._rests.keys() - set(usable):
            if rest := self._rests.pop(url):
                self._groups.appendleft(rest)
        for limit in self._slots.slots, self._slots.limit:
            while self._waiting and (free := [url for url in usable if self._busy[url] < limit(url)]):
                self._start(*self._next(free))
        if not self._waiting and self._busy.total() < sum(map(self._slots.slots, usable)):
            self._begun()

    def _next(self, free: Sequence[str]) -> tuple[str, Request]:
        """Return the next request, and the server with a `free` slot that gets it."""
        for url in free:
            if self._rests.get(url):
                return url, self._rests[url].popleft()
        url = min(free, key=self._busy.__getitem__)
        if not self._groups:
            return url, max(self._rests.values(), key=len).pop()
        self._rests[url] = self._groups.popleft()
        return url, self._rests[url].popleft()

    def _start(self, url: str, request: Request) -> None:
        self._waiting -= 1
        self._busy[url] += 1
        self._tasks.create_task(self._work_off(url, request))

    async def _work_off(self, url: str, request: Request) -> None:
        """Let the server work off a request, and give its slot the next one."""
        rollout = await self._respond(self, url, request)
        self._busy[url] -= 1
        if rollout is None:
            self._groups.append(deque([request]))
            self._waiting += 1
        else:
            self._deliver(request, rollout)
            self._undelivered -= 1
        self._fill()
        if not self._undelivered:
            self._delivered.set()

    async def _follow_queues(self) -> None:
        """Adapt the number of requests of each server to its waiting queue, while requests wait here."""

        async def look(url: str) -> None:
            with suppress(httpx.HTTPError):  # a failing server's error surfaces where its responses are awaited
                answer = await self.tools.client.get(f"{url}{QUEUE_ROUTE}", timeout=HEALTH_SECONDS)
                if queue := read_queue(answer.text):
                    self._slots.observe(url, queue, self._busy[url])

        seconds = QUEUE_SECONDS
        while True:
            await asyncio.sleep(seconds)
            began = time.monotonic()
            if self._waiting:
                await gather([look(url) for url in self._usable()])
            # a busy server computes its metrics for all clients, so a slow one is asked less often
            seconds = max(QUEUE_SECONDS, 20 * (time.monotonic() - began))

    async def _await_servers(self) -> None:
        """Report servers that return. Raises the errors of `run` when no server serves for too long."""
        silent_since = time.monotonic()
        while True:
            for url in self._fleet.returning(self._urls):
                await self._engine.report_if_ready(self.tools.client, url)
            if self._usable():
                silent_since = time.monotonic()
            elif not self._engine.refills and any([await answers(self.tools.client, url) for url in self._urls]):
                names = ", ".join(map(self._engine.name, self._urls))
                raise EngineStarved(f"{names}: none has weight version {self._engine.weight_version}")
            elif time.monotonic() - silent_since >= self._fleet.patience:
                raise self._engine.dead_error()
            await asyncio.sleep(LOOK_SECONDS)

    async def _watch(self) -> None:
        """Report servers that do not respond, and end their requests."""
        heard: dict[str, float] = {}  # server -> when it passed a health check last, or was not expected to
        while True:
            urls, began = self._usable(), time.monotonic()
            healthy = await gather([answers(self.tools.client, url) for url in urls])
            # this process was starved of CPU, so silence proves nothing
            starved = time.monotonic() - began > HEALTH_SECONDS + 1
            usable = self._fleet.usable(urls)
            for url, passed in zip(urls, healthy, strict=True):
                now = time.monotonic()
                if passed or starved or url not in usable:
                    heard[url] = now
                elif now - heard.setdefault(url, now) > REASSIGN_SECONDS:
                    self._fleet.silent(url)
                    self.tools.connections.end(url)
            await asyncio.sleep(WATCH_SECONDS)


def stream[T](work: Callable[[Callable[[T], None]], Coroutine[None, None, None]]) -> Generator[T]:
    """Run the coroutine `work(put)` in an event loop, and yield each value that it puts. Raises the error of `work`.

    The event loop runs only while the caller waits for the next value. Closing the iterator cancels `work`.
    """
    with asyncio.Runner() as runner:
        values, come = deque[T](), asyncio.Queue[bool]()  # False: `work` has ended

        def put(value: T) -> None:
            values.append(value)
            come.put_nowait(True)

        task = runner.get_loop().create_task(work(put))
        task.add_done_callback(lambda _: come.put_nowait(False))
        while runner.run(come.get()):  # `run` formats the result as text, so it is no group of rollouts
            yield values.popleft()
        task.result()


async def gather[T](coroutines: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run coroutines concurrently and return results in order. If one fails, cancel the others and raise its error."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


def first_error(errors: BaseException) -> BaseException:
    """Return the first error inside nested groups of errors."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors
