"""Detection of servers that hang: the process is alive but does not respond."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from megagrpo.engine.access import headers
from megagrpo.engine.http import CERTIFICATES, HEALTH_SECONDS, Silence, answers
from megagrpo.engine.servers.node_agent import AnyLauncher, AnyServer

CHECK_SECONDS = 2.0  # between two checks
# without a passed health check, after which a server counts as hung; at least as long is allowed for its engine
HANG_SECONDS = 60.0


class HangDetector:
    """Checks a launcher's servers at most every CHECK_SECONDS and kills those that hang. Construct it after all servers
    have responded.

    A server hangs when it has passed no health check for HANG_SECONDS. A restarted server that has not responded yet
    gets the launcher's `startup_timeout` instead.

    vLLM's HTTP process answers health checks even when its engine process hangs, so the engine is checked too. The
    engine responds between two generation steps, asleep or awake, but not while it loads weights. It therefore hangs
    only after `engine_seconds`, the timeout of a weight load, and never before HANG_SECONDS.
    """

    def __init__(self, launcher: AnyLauncher, engine_seconds: float):
        self._launcher, self._engine_seconds = launcher, max(engine_seconds, HANG_SECONDS)
        self._servers, self._engines = Silence(), Silence()
        self._have_responded = {server.process for server in launcher.servers}
        self._checked = 0.0  # monotonic clock

    def end_hung(self, say: Callable[[str], None]) -> None:
        """Kill servers that hang. Each is first reported to `say`, one line per server."""
        for server, reason in self._hung():
            say(f"vLLM server {server.url} {reason}; killing it")
            server.end()

    def _hung(self) -> list[tuple[AnyServer, str]]:
        """Return the servers that hang, each with a description of why."""
        if time.monotonic() - self._checked < CHECK_SECONDS:
            return []
        alive = [server for server in self._launcher.servers if server.alive]
        began = time.monotonic()
        responses = asyncio.run(self._ask([server.address for server in alive]))
        self._checked = time.monotonic()
        if self._checked - began > HEALTH_SECONDS + 1:  # this process was starved of CPU, so silence proves nothing
            return []
        judged = [(server, self._judge(server, *healthy)) for server, healthy in zip(alive, responses, strict=True)]
        return [(server, reason) for server, reason in judged if reason]

    async def _ask(self, urls: list[str]) -> list[tuple[bool, bool]]:
        """Check each server and its engine: a pair of booleans per URL."""
        async with httpx.AsyncClient(
            trust_env=False, verify=CERTIFICATES, headers=headers(self._launcher.token)
        ) as client:
            both = [asyncio.gather(answers(client, url), _engine_responds(client, url)) for url in urls]
            return await asyncio.gather(*both)

    def _judge(self, server: AnyServer, healthy: bool, engine_healthy: bool) -> str:
        """Record the result of one check. Return why the server counts as hung; empty when it does not."""
        pid = server.process
        if not healthy:
            limit = HANG_SECONDS if pid in self._have_responded else self._launcher.startup_timeout
            return f"has not passed a health check for {limit:g} s" if self._servers.goes_on(pid) > limit else ""
        self._have_responded.add(pid)
        self._servers.heard(pid)
        if engine_healthy:
            self._engines.heard(pid)
        elif self._engines.goes_on(pid) > self._engine_seconds:
            return (
                f"is up, but its engine has not responded for {self._engine_seconds:g} s (rollout.weight_sync_timeout)"
            )
        return ""


async def _engine_responds(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the engine behind the server responds: vLLM asks its engine whether it is paused."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            await client.get(f"{url}/is_paused", timeout=HEALTH_SECONDS)
    except (TimeoutError, httpx.HTTPError):
        return False
    return True
