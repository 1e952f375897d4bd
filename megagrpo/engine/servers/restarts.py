"""Recovery of servers: servers that died or joined get the current weights before they get requests. Servers that the
run itself started are also restarted when they end, and killed when they hang: alive, but without a response."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from megagrpo.engine.http.access import headers
from megagrpo.engine.http.connections import HEALTH_SECONDS, Connections, answers, healthy
from megagrpo.engine.http.fleet import State
from megagrpo.engine.http.server_calls import Silence
from megagrpo.engine.server_updates import Updates
from megagrpo.engine.servers.node_agent import AnyLauncher, AnyServer
from megagrpo.types import WeightSyncError

CHECK_SECONDS = 2.0  # between two checks
# without a passed health check, after which a server counts as hung; at least as long is allowed for its engine
HANG_SECONDS = 60.0
RESTART_LOOP_SECONDS = 0.3  # between two looks at the servers
# without a passed health check, after which the live process of a server that does not serve is killed
KILL_SILENT_SECONDS = 30.0
OUT = (State.JOINING, State.SILENT, State.EXCLUDED)  # the states in which a `Reconnector` fills a server with weights

# Loads the current weights into the server at an address; returns their version, or None when the server must wait for
# the next sync.
Refill = Callable[[str], int | None]


class HangDetector:
    """Checks a launcher's servers at most every CHECK_SECONDS and kills hung ones. Construct it after all responded.

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
        if time.monotonic() - self._checked < CHECK_SECONDS:
            return
        alive = [server for server in self._launcher.servers if server.alive]
        began = time.monotonic()
        responses = asyncio.run(self._ask([server.address for server in alive]))
        self._checked = time.monotonic()
        if self._checked - began > HEALTH_SECONDS + 1:  # this process was starved of CPU, so silence proves nothing
            return
        reasons = [self._judge(server, *response) for server, response in zip(alive, responses, strict=True)]
        for server, reason in zip(alive, reasons, strict=True):
            if reason:
                say(f"vLLM server {server.url} {reason}; killing it")
                server.end()

    async def _ask(self, urls: list[str]) -> list[tuple[bool, bool]]:
        """Check each server and its engine: a pair of booleans per URL."""
        async with Connections(headers(self._launcher.token), HEALTH_SECONDS) as client:
            # vLLM asks its engine whether it is paused
            both = [asyncio.gather(answers(client, url), answers(client, url, "/is_paused")) for url in urls]
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


class Reconnector:
    """A thread on trainer rank 0 that brings servers back into use. A context manager; leave it before servers stop.

    A server of `engine` that is out of use and healthy gets the current weights from `refill`, and then requests again.
    `say` gets a line for each event. This class starts and stops no server: the user started them.
    """

    def __init__(self, engine: Updates, refill: Refill, say: Callable[[str], None] = print):
        self.engine, self.fleet, self.refill, self.say = engine, engine.fleet, refill, say
        self._reported = self.fleet.states()  # the snapshot that the last lines were about
        self._end, self._ending = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="restarts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread: no server is restarted or brought back from here on. A refill that is in progress is not
        awaited; it ends when its server is stopped."""
        with self._ending:  # a restart in progress is awaited, so that the launcher can stop the new process
            self._end.set()
        self._thread.join(timeout=RESTART_LOOP_SECONDS + 1)

    def _run(self) -> None:
        while not self._end.wait(RESTART_LOOP_SECONDS):
            with self._reporting():
                self._look()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report a node that fails or does not respond, so that the thread goes on and tries again."""
        try:
            yield
        except WeightSyncError as error:
            if not self._end.is_set():
                self.say(
                    f"warning: the vLLM servers of another node cannot be watched or controlled; trying again: {error}"
                )

    def _look(self) -> None:
        before, states = self._reported, self.fleet.states()
        self._reported = states
        for url in sorted(before.keys() - states.keys()):
            self.say(f"vLLM server {url} removed (rollout.urls_file)")
        out = sorted(url for url, state in states.items() if state in OUT)
        for url in out:
            if before.get(url) in OUT:
                continue
            if states[url] is State.JOINING:
                self.say(f"vLLM server {url} will join when healthy and synced (rollout.urls_file)")
            else:
                self.say(f"warning: vLLM server {url} excluded until it responds correctly")
        for url in out:
            if not self.fleet.is_excluded(url) and healthy(url):
                self._fill(url, joins=states[url] is State.JOINING)

    def _fill(self, url: str, joins: bool = False) -> None:
        """Give the server current weights. If another version becomes current meanwhile, it is filled again later."""
        try:
            version = self.refill(url)
        except Exception as error:
            if not self._end.is_set():
                self._not_filled(url, error)
            return
        event = "has joined" if joins else "is back"
        if version is None:
            self.fleet.needs_weights(url)
            self.say(f"vLLM server {url} {event} and waits for the next weight sync")
        elif self.fleet.filled(url, version):
            self.say(f"vLLM server {url} {event}, with weight version {version}")

    def _not_filled(self, url: str, error: Exception) -> None:
        self.fleet.excluded(url)
        self.say(f"warning: vLLM server {url} did not load the current weights; still excluded: {error}")


class Restarter(Reconnector):
    """A Reconnector for a launcher's servers. It restarts ended ones on the same URL, up to `max_restarts` times each.

    It kills a server that hangs (`HangDetector`), that does not serve and stays silent, or that does not load the
    current weights. While servers sleep, the trainer uses their GPUs, and also the GPU of a server that ended: it is
    restarted only after the others wake up.
    With `Fleet.leaving` a server that does not serve and fails its health check is killed at once.
    """

    def __init__(self, launcher: AnyLauncher, engine: Updates, refill: Refill, say: Callable[[str], None] = print):
        super().__init__(engine, refill, say)
        self.launcher = launcher
        self._hang_detector = HangDetector(launcher, engine.sync_timeout)
        # a thread of its own, because it blocks on responses
        self._detecting = threading.Thread(target=self._detect, name="hang_detection", daemon=True)
        self._silence = Silence()

    def __enter__(self) -> Self:
        self._detecting.start()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._detecting.join(timeout=RESTART_LOOP_SECONDS + 1)

    def _detect(self) -> None:
        while not self._end.wait(RESTART_LOOP_SECONDS):
            with self._reporting():
                self._hang_detector.end_hung(lambda text: self.say(f"warning: {text}"))

    def _look(self) -> None:
        for index, server in enumerate(self.launcher.servers):
            self._look_at(index, server)

    def _look_at(self, index: int, server: AnyServer) -> None:
        url, state = server.url, self.fleet.state(server.url)
        if state is State.GONE:
            return
        if not server.alive:
            self.fleet.died(url)
            self._silence.heard(url)
            self._restart(index, server)
        elif state in (State.SERVING, State.NEEDS_WEIGHTS):
            self._silence.heard(url)
        elif healthy(server.address):
            self._fill(url)
        elif self.fleet.leaving:
            server.end()
        else:
            limit = self.launcher.startup_timeout if state is State.STARTING else KILL_SILENT_SECONDS
            if self._silence.goes_on(url) > limit:
                self.say(f"warning: vLLM server {url}: no response for {limit:g} s; killing it")
                server.end()

    def _fill(self, url: str, joins: bool = False) -> None:
        super()._fill(url, joins)
        if self.fleet.state(url) in (State.SERVING, State.NEEDS_WEIGHTS):
            self._silence.heard(url)

    def _restart(self, index: int, server: AnyServer) -> None:
        url = server.url
        if not self.launcher.may_restart(url):
            self.fleet.gone(url)
            self.say(
                f"warning: vLLM server {url} {server.exit_description}; restart limit {self.launcher.restarts[url]} "
                f"reached (rollout.max_restarts); log: {server.log}"
            )
            return
        with self._ending:
            if not self._end.is_set() and self.fleet.may_start(url):
                self.say(f"warning: {self.launcher.restart(index)}")

    def _not_filled(self, url: str, error: Exception) -> None:
        self.say(f"warning: vLLM server {url} did not load the current weights; killing it: {error}")
        next(server for server in self.launcher.servers if server.url == url).end()
