"""Distribution of conversations over the servers of a fleet: each turn goes to the server that holds its prefix."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from megagrpo.engine.http.connections import HEALTH_SECONDS, ConnectionFailed, Connections, answers
from megagrpo.engine.http.protocol import EngineError, EngineStarved
from megagrpo.engine.requests import GroupRequest, OnTokens, Request
from megagrpo.engine.server_slots import QUEUE_ROUTE, Slots, read_queue
from megagrpo.engine.server_updates import LOOK_SECONDS, Updates
from megagrpo.engine.tool_parsing import ToolCalls, read_tool_calls
from megagrpo.types import Prompt, Rollout, SamplingParams

WAKE_SECONDS = 0.02  # between two looks for servers with free slots
QUEUE_SECONDS = 0.5  # between two looks at the waiting queue of a server
WATCH_SECONDS = 2.0  # between two health checks of a server that works on requests
REASSIGN_SECONDS = 30.0  # without a passed health check, after which a server's requests go to other servers
THREAD_BYTES = 1 << 16  # of a body: a longer one is read in a thread
READING_THREADS = 2
OVER_SHARE = 1.5  # times the conversations of a server with a free slot, above which a full server's ones move there


@dataclass(eq=False)
class Tools:
    """What a generation works with: connections, a thread pool that reads bodies, the slots of each server, the number
    of data-parallel copies in a server, and this client's number, by which clients begin with different servers."""

    connections: Connections
    threads: ThreadPoolExecutor
    slots: Slots
    copies: int = 1
    number: int = 0


@dataclass(eq=False)
class Home:
    """One conversation of a generation: the server that holds its prefix, and a slot there while it takes a turn.

    `url` is None until a server has room, and `granted` is done when the conversation has the slot that it waits for.
    `copy` is the server's data-parallel copy that holds the prefix.
    """

    granted: asyncio.Future[None]
    url: str | None = None
    copy: int = 0
    has_slot: bool = False
    is_waiting: bool = False  # it is in a queue for a slot, also after a cancelled wait
    queued: float = 0.0  # seconds that its turns have waited for slots


class Generation:
    """Turns of conversations on the servers of a fleet. `Slots` says how many turns a server works on at once. A
    conversation may have one turn only.

    A group of conversations that share a prompt begins on the server with the fewest conversations. All conversations
    of the group begin there, because its prefix cache then holds the prompt. Another server takes one of them only if
    it has a free slot, no group is left to begin, and the group's own server has none free: then it takes the last one
    of the longest rest.

    A later turn goes to the server of the turn before, which holds its prefix, and precedes conversations that have not
    begun. When no conversation is left to begin and another server has a free slot, it moves if its server has none and
    has over OVER_SHARE times the other one's conversations, or lets as many turns wait as it has slots. It also moves
    when its server fails. Results do not depend on the server.

    `respond` returns a server's rollout for a request, or None when the request must be retried. `begun` is called when
    all conversations have begun, no turn waits for a slot, and a server has a free one.

    When a server stops serving, its requests go to other servers. With the fleet's `patience`, servers that return are
    used again. The servers are those of the fleet at construction, although `follow` may be called meanwhile.
    """

    def __init__(
        self,
        engine: Updates,
        tools: Tools,
        respond: Callable[[Generation, str, Request], Awaitable[Rollout | None]],
        begun: Callable[[], None],
    ):
        self._engine, self._fleet, self.tools, self._slots = engine, engine.fleet, tools, tools.slots
        self._respond, self._begun = respond, begun
        urls = self._fleet.urls if self._fleet.patience else engine.serving()
        self._urls = urls[tools.number % len(urls) :] + urls[: tools.number % len(urls)]
        self._groups: deque[deque[Home]] = deque()  # groups that no server has begun, and rests of groups
        self._rests: dict[str, deque[Home]] = {}  # server -> the rest of the group that it has begun
        self._later: dict[str, deque[Home]] = {}  # server -> its conversations that wait for a slot for a later turn
        self._lost: deque[Home] = deque()  # those whose server failed
        self._waiting = self._opened = 0  # conversations that wait for a slot, and those of all calls of `open`
        self._busy = Counter[str]()  # server -> its slots in use
        self._homes = Counter[str]()  # server -> its conversations
        self._of_copies = Counter[tuple[str | None, int]]()  # (server, copy) -> its conversations
        self._shared: dict[tuple[object, str], asyncio.Future[bool]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve turns until the block ends. Raises, in groups of errors, EngineDeadError when no server is left, and
        EngineStarved if all left need weights."""
        beside = [self._dispatch(), self._follow_queues()]
        beside += [self._await_servers(), self._watch()] if self._fleet.patience else []
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(coroutine) for coroutine in beside]
            yield
            for task in background:
                task.cancel()

    def open(self, count: int) -> list[Home]:
        """Return the homes of `count` conversations that share a prompt, to be closed by `close`. Each has a slot for
        its first turn when its `granted` is done."""
        loop = asyncio.get_running_loop()
        homes = [Home(loop.create_future(), is_waiting=True) for _ in range(count)]
        self._groups.append(deque(homes))
        self._waiting += count
        self._opened += count
        return homes

    def beside(self, home: Home) -> Home:
        """Return a home for a turn beside another one of the same conversation, at its server. Close it as others."""
        other = Home(asyncio.get_running_loop().create_future())
        other.granted.set_result(None)
        if home.url is not None:
            self._enter(other, home.url, home.copy)
        return other

    def close(self, home: Home) -> None:
        """End a conversation."""
        home.granted.cancel()
        self._free(home)
        self._leave(home)

    async def turn(
        self, prompt: Prompt, sampling: SamplingParams, seed: int, home: Home, on_tokens: OnTokens | None = None
    ) -> Rollout:
        """Generate one turn of a conversation: a response to `prompt`, which holds all tokens before it. `on_tokens`
        gets its tokens as they come."""
        group = GroupRequest(prompt, 1, sampling, seed, self._engine.weight_version)
        return await self.respond(Request(group, 0, is_pinned=self.tools.copies > 1, on_tokens=on_tokens), home)

    async def read_tool_calls(self, turn: Sequence[int], tools: Sequence[dict[str, Any]], home: Home) -> ToolCalls:
        """Return the text of a turn outside of its tool calls, and the calls. A server parses them with the tool parser
        that it started with: the turn's own server, or another one if that does not respond, for as long as servers may
        return. Raises EngineError when none can."""
        deadline = time.monotonic() + self._fleet.patience
        while True:
            usable = self._usable()
            for url in sorted(usable, key=lambda url: url != home.url):
                try:
                    return await read_tool_calls(self.tools.connections, url, turn, tools)
                except ConnectionFailed as error:
                    failure = str(error)
            if not usable:
                failure = str(self._engine.dead_error())
            if time.monotonic() >= deadline:
                raise EngineError(failure)
            await asyncio.sleep(LOOK_SECONDS)

    async def respond(self, request: Request, home: Home) -> Rollout:
        """Return the rollout for the request, from the conversation's own server if possible."""
        while True:
            if home.granted.done() and not home.has_slot:
                self._queue(home)
            began = time.monotonic()
            try:
                await home.granted
                home.queued += time.monotonic() - began
                assert home.url is not None, "a conversation with a slot has a server"
                request.copy = home.copy if request.is_pinned else None
                rollout = await self._respond(self, home.url, request)
                if rollout is not None:
                    return rollout
            finally:
                self._free(home)
            self._leave(home)  # any server may retry it

    async def shared(self, check: Callable[[Connections, str], Coroutine[None, None, bool]], url: str) -> bool:
        """Return the result of `check` on the server. Requests that ask at once share one check: thousands may fail
        together."""
        if (key := (check, url)) not in self._shared:
            running = self._shared[key] = asyncio.ensure_future(check(self.tools.connections, url))
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
        """Give free slots to conversations, until no server is left and none may return."""
        while self._fleet.patience or self._usable() or not self._waiting:
            self._fill()
            await asyncio.sleep(WAKE_SECONDS)
        raise self._engine.dead_error()

    def _fill(self) -> None:
        """Give free slots to waiting conversations. First a server's slots are filled, then its waiting queue."""
        usable = self._usable()
        for url in self._rests.keys() - set(usable):
            if rest := self._rests.pop(url):
                self._groups.appendleft(rest)
        for url in self._later.keys() - set(usable):
            self._lost += self._later.pop(url)
        for limit in self._slots.slots, self._slots.limit:
            while self._waiting and (free := [url for url in usable if self._busy[url] < limit(url)]):
                if (following := self._next(free)) is None:
                    break
                self._grant(*following)
        if self._opened and not self._waiting and self._busy.total() < sum(map(self._slots.slots, usable)):
            self._begun()

    def _next(self, free: Sequence[str]) -> tuple[str, Home] | None:
        """Return the next conversation that gets a slot, and its server, one of `free`. None if all waiting ones stay
        at servers that are not free."""
        for queues in self._later, self._rests:
            for url in free:
                if queues.get(url):
                    return url, queues[url].popleft()
        url = min(free, key=self._homes.__getitem__)
        if self._lost:
            return url, self._lost.popleft()
        if self._groups:
            self._rests[url] = self._groups.popleft()
            return url, self._rests[url].popleft()
        if rest := max(self._rests.values(), key=len, default=None):
            return url, rest.pop()
        waiting, _, full = max((len(homes), self._homes[of], of) for of, homes in self._later.items())
        waits_long = waiting >= self._slots.slots(full)
        if waits_long or self._homes[full] > OVER_SHARE * (self._homes[url] + 1):
            return url, self._later[full].pop()
        return None

    def _queue(self, home: Home) -> None:
        """Let a conversation wait for a slot for a later turn."""
        home.granted = asyncio.get_running_loop().create_future()
        if home.is_waiting:  # an earlier wait was cancelled, and its place in the queue is left
            return
        home.is_waiting = True
        self._waiting += 1
        if home.url is None:
            self._lost.append(home)
        else:
            self._later.setdefault(home.url, deque()).append(home)
        self._give(home.url)

    def _grant(self, url: str, home: Home) -> None:
        self._waiting -= 1
        home.is_waiting = False
        if home.granted.cancelled():
            return
        home.has_slot = True
        self._busy[url] += 1
        if home.url != url:
            self._leave(home)
            first = self.tools.number % self.tools.copies  # clients begin with different copies
            copies = [(first + i) % self.tools.copies for i in range(self.tools.copies)]
            self._enter(home, url, min(copies, key=lambda copy: self._of_copies[url, copy]))
        home.granted.set_result(None)

    def _enter(self, home: Home, url: str, copy: int) -> None:
        """Record the conversation's server."""
        home.url, home.copy = url, copy
        self._homes[url] += 1
        self._of_copies[url, copy] += 1

    def _leave(self, home: Home) -> None:
        """Record that the conversation has no server."""
        if home.url is not None:
            self._homes[home.url] -= 1
            self._of_copies[home.url, home.copy] -= 1
        home.url = None

    def _free(self, home: Home) -> None:
        """Take back a conversation's slot, if it has one, and give it to the next one."""
        if home.has_slot and home.url is not None:
            self._busy[home.url] -= 1
        home.has_slot = False
        self._give(home.url)

    def _give(self, url: str | None) -> None:
        """Give a free slot of the server to the conversation there that waits first. Only if conversations wait at
        other servers alone, or have not begun, all servers are looked at: there may be thousands."""
        is_free = url is not None and self._busy[url] < self._slots.slots(url) and bool(self._fleet.usable([url]))
        if url is not None and is_free and self._later.get(url):
            self._grant(url, self._later[url].popleft())
        elif self._waiting:
            self._fill()
        elif is_free:
            self._begun()

    async def _follow_queues(self) -> None:
        """Adapt the number of requests of each server to its waiting queue, while requests wait here."""

        async def look(url: str) -> None:
            with suppress(
                ConnectionFailed, TimeoutError
            ):  # a failing server's error surfaces where its responses are awaited
                answer = await self.tools.connections.request(url, QUEUE_ROUTE, method="GET", seconds=HEALTH_SECONDS)
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
                await self._engine.report_if_ready(self.tools.connections, url)
            if self._usable():
                silent_since = time.monotonic()
            elif not self._engine.refills and any([await answers(self.tools.connections, url) for url in self._urls]):
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
            healthy = await gather([answers(self.tools.connections, url) for url in urls])
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
