"""Recovery of servers: servers that died or joined get the current weights before they get requests. Servers of the run are restarted when
they end, and killed when they hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megagrpo.engine.updates import Updates
from megagrpo.servers.hang_detection import Pulse, Silence
from megagrpo.servers.launcher import Launcher, Server, healthy

LOOK_SECONDS = 0.3
SILENT_SECONDS = 30.0  # without a response, after which a live process is killed


class Watcher:
    """A thread on the trainer's rank 0 that brings servers back into use. A context manager; leave it before the servers are stopped.

    A server that `engine` counts as dead and that is healthy gets the current weights from `refill(address)`, and then requests again. When
    `refill` returns False, the server waits for the next sync. `say` gets a line for each event. This class starts and stops no server: the
    user started them.
    """

    def __init__(self, engine: Updates, refill: Callable[[str], bool], say: Callable[[str], None] = print):
        self.engine, self.refill, self.say = engine, refill, say
        self._out: set[str] = set()
        self._urls = engine.urls
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        """Stop the thread: no server is restarted or brought back from here on. A refill that is in progress is not awaited; it ends when
        its server is stopped."""
        with self._lock:
            self._end.set()
        self._thread.join(timeout=LOOK_SECONDS + 1)

    def _run(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        dead, joining, urls = self.engine.dead - self.engine.waiting, self.engine.joining, self.engine.urls
        for url in sorted(set(self._urls) - set(urls)):
            self.say(f"vLLM server {url} removed (rollout.urls_file)")
        for url in sorted(dead - self._out):
            if url in joining:
                self.say(f"vLLM server {url} will join when healthy and synced (rollout.urls_file)")
            else:
                self.say(f"warning: vLLM server {url} excluded until it responds correctly")
        self._out, self._urls = dead, urls
        for url in sorted(dead):
            if not self.engine.barred(url) and healthy(url):
                self._fill(url)

    def _fill(self, url: str) -> None:
        try:
            filled = self.refill(url)
        except Exception as error:
            if not self._end.is_set():
                self._not_filled(url, error)
            return
        there = "has joined" if url in self.engine.joining else "is back"
        self.engine.joining.discard(url)
        if not filled:
            self.engine.waiting.add(url)
            self.say(f"vLLM server {url} {there} and waits for the next weight sync")
        else:
            self.engine.dead.discard(url)
            self.say(f"vLLM server {url} {there}, with weight version {self.engine.weight_version}")
        self._settled(url)

    def _settled(self, url: str) -> None:
        """Called when a server is in use again, waits for the next sync, or has ended."""

    def _not_filled(self, url: str, error: Exception) -> None:
        self.engine.leave_out(url)
        self.say(f"warning: vLLM server {url} did not load the current weights; still excluded: {error}")


class Keeper(Watcher):
    """A Watcher for a launcher's servers. It restarts servers that ended, on the same URL, up to the launcher's `max_restarts` times each.

    It kills servers that hang: by `Pulse`, or when a dead-marked server stays silent. When no restart is left for any server, `engine`
    stops waiting for servers. While servers sleep, the trainer uses their GPUs, and also the GPU of a server that ended: such a server is
    restarted only after the others wake up.
    """

    def __init__(self, launcher: Launcher, engine: Updates, refill: Callable[[str], bool], say: Callable[[str], None] = print):
        super().__init__(engine, refill, say)
        self.launcher = launcher
        self._pulse = Pulse(launcher, engine.sync_timeout)
        # a thread of its own, because it blocks on responses
        self._feeling = threading.Thread(target=self._feel, name="pulse", daemon=True)
        self._silence = Silence()
        self._starting: set[str] = set()
        self._given_up: set[str] = set()

    def __enter__(self) -> Keeper:
        self._feeling.start()
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self._feeling.join(timeout=LOOK_SECONDS + 1)

    def _feel(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self._pulse.end_hung(lambda text: self.say(f"warning: {text}"))

    def _look(self) -> None:
        for place, server in enumerate(self.launcher.servers):
            if server.url not in self._given_up:
                self._look_at(place, server)

    def _look_at(self, place: int, server: Server) -> None:
        url = server.url
        if not server.alive:
            self.engine.dead.add(url)
            self.engine.waiting.discard(url)
            self._start_again(place, server)
        elif url in self.engine.dead and url not in self.engine.waiting:
            self.engine.unsettled.add(url)
            if healthy(server.address):
                self._fill(url)
            elif self.engine.leaving:
                server.end()
            else:
                limit = self.launcher.startup_timeout if url in self._starting else SILENT_SECONDS
                if self._silence.goes_on(url) > limit:
                    self.say(f"warning: vLLM server {url}: no response for {limit:g} s; killing it")
                    server.end()
        else:
            self._settled(url)

    def _start_again(self, place: int, server: Server) -> None:
        url = server.url
        self._settled(url)
        if not self.launcher.may_start_again(server):
            self._given_up.add(url)
            if len(self._given_up) == len(self.launcher.servers):
                self.engine.patience = 0.0
            self.say(
                f"warning: vLLM server {url} {server.fate}; restart limit {self.launcher.restarts[url]} reached "
                f"(rollout.max_restarts); log: {server.log}"
            )
            return
        with self._lock:
            if self._end.is_set():
                return
            self.engine.unsettled.add(url)
            # Check `asleep` after adding to `unsettled`; Updates.sleep does the reverse. This order closes the race.
            if self.engine.asleep:
                self.engine.unsettled.discard(url)
                return
            self._starting.add(url)
            self.say(f"warning: {self.launcher.start_again(place)}")

    def _settled(self, url: str) -> None:
        self._silence.heard(url)
        self._starting.discard(url)
        self.engine.unsettled.discard(url)

    def _not_filled(self, url: str, error: Exception) -> None:
        self.say(f"warning: vLLM server {url} did not load the current weights; killing it: {error}")
        next(server for server in self.launcher.servers if server.url == url).end()
