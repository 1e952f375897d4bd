"""HTTP access to vLLM servers: connections, health checks, control requests, and addresses that change."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import Any

import httpx

from megagrpo.engine.http.access import headers
from megagrpo.engine.http.fleet import Fleet
from megagrpo.engine.http.protocol import EngineDeadError
from megagrpo.platform.process.atomic_file import write_atomically
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.types import WeightSyncError

# shared: each client would otherwise load the certificates again, which takes longer than a request
CERTIFICATES = httpx.create_ssl_context(trust_env=False)
# with thousands of requests, seconds may pass before this process sees that a connection is open
CONNECT_SECONDS = 30.0
MOVED_SECONDS = 0.5  # while a response is pending: between two checks whether its server has moved
OF_PROXIES = (502, 503, 504)  # status codes by which a proxy reports that the server behind it did not respond
HEALTH_SECONDS = 5.0  # timeout of a health check
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
        client: httpx.AsyncClient,
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
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
        try:
            answer = await client.request(method, f"{url}{path}", json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise ServerTimeout(
                f"{self.name(url)} did not respond to {path} within {seconds or self.request_timeout:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise NoAnswer(f"{self.name(url)} did not respond to {path}: {error!r}") from error
        if answer.status_code == 404 and optional:
            return None
        if answer.status_code != 200:
            kind = NoAnswer if answer.status_code in OF_PROXIES else WeightSyncError
            raise kind(f"{self.name(url)} answered {answer.status_code} to {path}: {error_text(answer)}")
        content = answer.headers.get("content-type", "")
        try:
            if content.startswith("text/html"):
                raise ValueError(content)
            return answer.json() if content.startswith("application/json") else None
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

    def _client(self) -> httpx.AsyncClient:
        """Return a client for control requests, of which few run at once. `Connections` sends requests for tokens."""
        # vLLM closes a connection after an error. A request that reuses the connection at that moment would be lost, so
        # none is kept alive.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(verify=CERTIFICATES, limits=limits, trust_env=False)
        return httpx.AsyncClient(
            timeout=httpx.Timeout(self.request_timeout, connect=CONNECT_SECONDS),
            transport=transport if self.moved is None else MovedTransport(transport, self.moved),
            headers=self._headers,
        )

    def metrics(self, url: str) -> bytes:
        """Return the text of a server's `/metrics`. Raises an error of httpx when it does not respond."""

        async def ask() -> bytes:
            async with self._client() as client:
                answer = await client.get(f"{url}/metrics", timeout=HEALTH_SECONDS)
            return answer.raise_for_status().content

        return asyncio.run(ask())

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


class MovedTransport(httpx.AsyncBaseTransport):
    """An HTTP transport that sends requests to the servers' current addresses. A request to a server that moves before
    it responds fails."""

    def __init__(self, transport: httpx.AsyncHTTPTransport, moved: MovedServers):
        self._transport, self._moved = transport, moved

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request. Raises httpx.ReadError when the server moves before it responds."""
        return await self._moved.send(request, self._transport)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


class MovedServers:
    """Current addresses of servers that were restarted on another port because another process had taken their port.

    The launcher writes `file`, a JSON object URL -> current address; every rank reads it. A server keeps its first URL
    as its name, so nothing else changes when it moves.
    """

    def __init__(self, file: Path):
        self._file, self._looked = file, -math.inf
        self._addresses: dict[str, httpx.URL] = {}

    def write(self, addresses: dict[str, str]) -> None:
        """Replace the file atomically, so that no reader sees a partial file."""
        write_atomically(self._file, json.dumps(addresses))

    def forget(self) -> None:
        """Remove the file of an earlier start."""
        remove(self._file)

    async def send(self, request: httpx.Request, transport: httpx.AsyncBaseTransport) -> httpx.Response:
        """Send `request` through `transport` to the current address of its server.

        Raises httpx.ReadError when the server moves before it responds. The process that took its port may accept a
        connection and never respond, so the request would wait for its whole timeout.
        """
        url = f"{request.url.scheme}://{request.url.netloc.decode()}"
        address = self.address(url)
        if address is not None:
            request.url = request.url.copy_with(host=address.host, port=address.port)
            request.headers["host"] = address.netloc.decode()
        response = asyncio.ensure_future(transport.handle_async_request(request))
        try:
            while not (await asyncio.wait([response], timeout=MOVED_SECONDS))[0]:
                if self.address(url, MOVED_SECONDS) != address:
                    raise httpx.ReadError(
                        "the server was restarted on another port before it responded", request=request
                    )
            return response.result()
        finally:
            response.cancel()

    def address(self, url: str, age: float = 0.0) -> httpx.URL | None:
        """Return the current address of the server `url` if it has moved, as of at most `age` seconds ago."""
        if time.monotonic() - self._looked >= age:
            self._looked = time.monotonic()
            try:
                addresses = json.loads(self._file.read_text())
                self._addresses = {name: httpx.URL(address) for name, address in addresses.items()}
            except FileNotFoundError:  # no server has moved
                self._addresses = {}
            except (OSError, ValueError):  # a shared file system may fail for a moment: keep what was read last
                pass
        return self._addresses.get(url)


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
        async with httpx.AsyncClient(trust_env=False, verify=CERTIFICATES) as client:
            return await asyncio.gather(*(answers(client, url) for url in urls))

    if silent := [url for url, answered in zip(urls, asyncio.run(check()), strict=True) if not answered]:
        raise ValueError(
            f"rollout.urls: {', '.join(silent)} does not respond; start it, or leave rollout.urls empty to have one "
            "started"
        )


async def answers(client: httpx.AsyncClient, url: str, route: str = "/health") -> bool:
    """Whether the server at `url` passes its health check, or responds to another route in the same time.

    The check is repeated once if the server closed a kept connection at this moment, or if this process was starved of
    CPU: neither proves that the server fails.
    """
    for _ in range(2):
        began = time.monotonic()
        try:
            # limits the total time; httpx's timeout only limits the time between two bytes
            async with asyncio.timeout(HEALTH_SECONDS):
                return (await client.get(f"{url}{route}", timeout=HEALTH_SECONDS)).status_code == 200
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            continue
        except (TimeoutError, httpx.TimeoutException):
            if time.monotonic() - began < HEALTH_SECONDS + 1:
                return False
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
    return False


def error_text(answer: httpx.Response) -> str:
    """Return the server's own error message from an error response."""
    return text_of_error(answer.status_code, answer.content)


def text_of_error(status: int, content: bytes) -> str:
    """Return the server's own error message from the body of an error response."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace") or f"status {status}"
