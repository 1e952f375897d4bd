"""Servers that hang: processes that are there and say nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable

import httpx

from megagrpo.engine.access import headers
from megagrpo.engine.http import CERTIFICATES, HEALTH_SECONDS, answers
from megagrpo.servers.launcher import Launcher, Server

PULSE_SECONDS = 2.0  # between two looks
SILENT_SECONDS = 60.0  # without an answer to a health check, after which a server hangs; its engine never before
LONGEST = 10.0  # of the time between two looks, what counts at most


class Silence:
    """For how long somebody has said nothing, by those who listen: where they were halted or busy themselves, that time is no silence."""

    def __init__(self):
        self._seconds: dict[Hashable, float] = {}
        self._looked: dict[Hashable, float] = {}

    def heard(self, who: Hashable) -> None:
        """An answer has come."""
        self._seconds.pop(who, None)
        self._looked.pop(who, None)

    def goes_on(self, who: Hashable) -> float:
        """No answer has come now either; the seconds without one."""
        now = time.monotonic()
        self._seconds[who] = self._seconds.get(who, 0.0) + min(now - self._looked.get(who, now), LONGEST)
        self._looked[who] = now
        return self._seconds[who]


class Pulse:
    """Asks the servers of a launcher, all of which have answered once, how they are, every PULSE_SECONDS at most.

    A server hangs when it has answered no health check for SILENT_SECONDS, or, started again, none at all for the launcher's
    `startup_timeout`. The process that answers them only stands in front of the engine, which is therefore asked as well: it answers
    between two steps of generation, asleep or awake, but not while it takes in weights. So it may be silent for `engine_seconds`: as long
    as that may take.
    """

    def __init__(self, launcher: Launcher, engine_seconds: float):
        self._launcher, self._engine_seconds = launcher, max(engine_seconds, SILENT_SECONDS)
        self._servers, self._engines = Silence(), Silence()
        self._have_answered = {server.supervisor.pid for server in launcher.servers}
        self._looked = 0.0

    def end_hung(self, say: Callable[[str], None]) -> None:
        """End servers that hang, after a line for each to `say`."""
        for server, words in self._hung():
            say(f"vLLM server {server.url} {words}; ending it")
            server.end()

    def _hung(self) -> list[tuple[Server, str]]:
        """Servers that hang, and the words for it."""
        if time.monotonic() - self._looked < PULSE_SECONDS:
            return []
        alive = [server for server in self._launcher.servers if server.alive]
        began = time.monotonic()
        said = asyncio.run(self._ask([server.address for server in alive]))
        self._looked = time.monotonic()
        if self._looked - began > HEALTH_SECONDS + 1:  # this process had no time to listen
            return []
        judged = [(server, self._judge(server, *answered)) for server, answered in zip(alive, said, strict=True)]
        return [(server, words) for server, words in judged if words]

    async def _ask(self, urls: list[str]) -> list[list[bool]]:
        """Whether each server, and its engine, answers."""
        async with httpx.AsyncClient(trust_env=False, verify=CERTIFICATES, headers=headers(self._launcher.token)) as client:
            both = [asyncio.gather(answers(client, url), _engine_answers(client, url)) for url in urls]
            return await asyncio.gather(*both)

    def _judge(self, server: Server, well: bool, engine_well: bool) -> str:
        this = server.supervisor.pid  # another one when it was started again
        if not well:
            limit = SILENT_SECONDS if this in self._have_answered else self._launcher.startup_timeout
            return f"has answered no health check for {limit:g} s" if self._servers.goes_on(this) > limit else ""
        self._have_answered.add(this)
        self._servers.heard(this)
        if engine_well:
            self._engines.heard(this)
        elif self._engines.goes_on(this) > self._engine_seconds:
            return f"answers, but its engine has said nothing for {self._engine_seconds:g} s (rollout.weight_sync_timeout)"
        return ""


async def _engine_answers(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the engine behind the server answers; vLLM has it say whether it is paused."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            await client.get(f"{url}/is_paused", timeout=HEALTH_SECONDS)
    except (TimeoutError, httpx.HTTPError):
        return False
    return True
