"""Control requests to the vLLM servers of a run, their health checks, and the file that names them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import Any

from megagrpo.engine.http.access import headers
from megagrpo.engine.http.connections import (
    HEALTH_SECONDS,
    JSON,
    NO_HEADERS,
    ConnectionFailed,
    Connections,
    MovedServers,
    answers,
    ask,
)
from megagrpo.engine.http.fleet import Fleet
from megagrpo.engine.http.protocol import EngineDeadError
from megagrpo.types import WeightSyncError

OF_PROXIES = (502, 503, 504)  # status codes by which a proxy reports that the server behind it did not respond
# of silence counted per check, so that a pause of this process does not count as silence of the server
MAX_COUNTED_SECONDS = 10.0


@dataclass(eq=False, repr=False)  # a token must not be shown
class Servers:
    """Requests to the vLLM servers of a `fleet`.

    `initial_urls` are the server addresses and `patience` as in `Fleet`. `logs` are the log files (for messages),
    `token` authenticates requests. While the file `urls_file` exists, it names the servers: see `follow`. `moved` maps
    servers that were restarted on another port to their new address. Raises ValueError without any URL.
    """

    initial_urls: InitVar[Sequence[str]]
    _: KW_ONLY
    patience: InitVar[float] = 0.0
    logs: InitVar[Sequence[Path]] = ()
    token: InitVar[str | None] = None
    request_timeout: float = 1800.0
    urls_file: Path | None = None
    moved: MovedServers | None = None

    def __post_init__(
        self, initial_urls: Sequence[str], patience: float, logs: Sequence[Path], token: str | None
    ) -> None:
        self.fleet, self._headers = Fleet(initial_urls, patience), headers(token)
        self._logs = dict(zip(initial_urls, logs, strict=False))

    @property
    def urls(self) -> list[str]:
        """The servers of the run, in order."""
        return self.fleet.urls

    def follow(self) -> None:
        """Update the fleet from `urls_file`. A file that is missing or names no server changes nothing."""
        named = [] if self.urls_file is None else read_urls(self.urls_file)
        if named:
            self.fleet.follow(named)

    async def _request(
        self,
        client: Connections,
        url: str,
        path: str,
        body: Any = None,
        seconds: float | None = None,
        *,
        method: str = "POST",
        optional: bool = False,
    ) -> Any:
        """Send a control request and return the response's JSON; None without the `optional` route or without JSON.

        Raises WeightSyncError for an error status, or its subclasses: ServerTimeout on a timeout, NoAnswer when the
        server itself did not respond.
        """
        try:
            answer = await client.request(url, path, body, method, seconds)
        except TimeoutError as error:
            raise ServerTimeout(
                f"{self.name(url)} did not respond to {path} within {seconds or self.request_timeout:g} s"
            ) from error
        except ConnectionFailed as error:
            raise NoAnswer(f"{self.name(url)} did not respond to {path}: {error}") from error
        if answer.status == 404 and optional:
            return None
        if answer.status != 200:
            kind = NoAnswer if answer.status in OF_PROXIES else WeightSyncError
            raise kind(f"{self.name(url)} answered {answer.status} to {path}: {answer.error()}")
        try:
            if answer.kind.startswith("text/html"):
                raise ValueError(answer.kind)
            return json.loads(answer.content) if answer.kind.startswith(JSON) else None
        except ValueError as error:
            raise NoAnswer(
                f"{self.name(url)} sent a response to {path} that is not JSON: {answer.text[:80]!r}"
            ) from error

    async def _each(
        self, verb: Callable[..., Coroutine[Any, Any, Any]], urls: Collection[str], *args: Any
    ) -> list[Any]:
        """Run `verb` on each of `urls` concurrently. The first error is raised after all have finished."""
        async with self._client() as client:
            results = await asyncio.gather(*(verb(client, url, *args) for url in urls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _client(self) -> Connections:
        return Connections(self._headers, self.request_timeout, self.moved)

    def metrics(self, url: str) -> bytes:
        """Return the text of a server's `/metrics`. Raises the errors of `ask`, and ConnectionFailed for an error."""
        answer = ask(url, "/metrics", method="GET", headers=self._headers, seconds=HEALTH_SECONDS, moved=self.moved)
        if answer.status != 200:
            raise ConnectionFailed(f"{self.name(url)}: {answer.error()}")
        return answer.content

    def serving(self) -> list[str]:
        """Return the servers that get requests. Raises EngineDeadError when there is none."""
        if not (serving := self.fleet.serving()):
            raise self.dead_error()
        return serving

    def dead_error(self) -> EngineDeadError:
        """The error for a run without any server, with the addresses and log files."""
        return EngineDeadError("no vLLM server responds any longer: " + ", ".join(map(self.name, self.urls)))

    def name(self, url: str) -> str:
        """The server's name for messages, with its log file."""
        return f"vLLM server {url}" + (f" (log {self._logs[url]})" if url in self._logs else "")


class Silence:
    """Measures how long a server has not responded. Time in which this process was stopped or busy does not count."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}
        self._checked: dict[Hashable, float] = {}

    def heard(self, server: Hashable) -> None:
        """Reset the silence of `server`: it has responded."""
        self._seconds.pop(server, None)
        self._checked.pop(server, None)

    def goes_on(self, server: Hashable) -> float:
        """Record one more check of `server` without a response. Returns the seconds of silence so far."""
        now = time.monotonic()
        since_last_check = min(now - self._checked.get(server, now), MAX_COUNTED_SECONDS)
        self._seconds[server] = self._seconds.get(server, 0.0) + since_last_check
        self._checked[server] = now
        return self._seconds[server]


class ServerTimeout(WeightSyncError):
    """A server accepted a request but did not respond in time."""


class NoAnswer(WeightSyncError):
    """The connection failed, or something other than the server responded."""


def read_urls(file: Path) -> list[str]:
    """Read addresses from a file, one per line, without duplicates. Lines that do not begin with http:// or https://
    are skipped. Returns an empty list when the file cannot be read."""
    try:
        lines = [line.strip().rstrip("/") for line in file.read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return list(dict.fromkeys(line for line in lines if line.startswith(("http://", "https://"))))


def named_urls(urls: Sequence[str], file: str | None) -> list[str]:
    """Return the servers that the file currently names, or `urls` when it names no server."""
    return (read_urls(Path(file)) if file else []) or list(urls)


def check_urls(urls: Sequence[str]) -> None:
    """Check the health of all servers of `rollout.urls`. Raises ValueError that names those that do not respond."""

    async def check() -> list[bool]:
        async with Connections(NO_HEADERS, HEALTH_SECONDS) as client:
            return await asyncio.gather(*(answers(client, url) for url in urls))

    if silent := [url for url, answered in zip(urls, asyncio.run(check()), strict=True) if not answered]:
        raise ValueError(
            f"rollout.urls: {', '.join(silent)} does not respond; start it, or leave rollout.urls empty to have one "
            "started"
        )
