"""vLLM servers seen from outside: their addresses, which of them answer, and requests that steer them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx

from megagrpo.engine.access import headers
from megagrpo.engine.protocol import EngineDeadError
from megagrpo.transfer.manifest import WeightSyncError

CERTIFICATES = httpx.create_ssl_context(trust_env=False)  # every client would read them anew, which takes longer than a request
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds that a server which cannot be trusted is left out for
CONNECT_SECONDS = 30.0  # more than thousands of requests that begin at once keep this process from looking
POOLS = 64  # of connections, for one client
GOOD_SECONDS = 120.0  # that it must do well for before that begins with the first one again
OF_PROXIES = (502, 503, 504)  # status codes that say that the server behind did not answer
HEALTH_SECONDS = 5.0  # within which a server answers that it is well


class Servers:
    """`urls` are the servers, `logs` their log files for messages, `token` what they ask for. `dead` are those that no request goes to,
    `waiting` those of them that only need new weights, `joining` those that were never asked. While there is a file `urls_file`, it names
    the servers: see `follow`. `moved` says at which addresses servers listen that were restarted at another port."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        logs: Sequence[Path] = (),
        request_timeout: float = 1800.0,
        token: str | None = None,
        urls_file: Path | None = None,
        moved: MovedServers | None = None,
    ):
        if not urls:
            raise ValueError("rollout.urls: no vLLM server is named and none was started")
        self.urls, self.timeout = list(urls), request_timeout
        self.logs = dict(zip(urls, logs, strict=False))
        self._headers, self.urls_file, self._moved = headers(token), urls_file, moved
        self._faults: Counter[str] = Counter()
        self._barred_until: dict[str, float] = {}
        self.dead: set[str] = set()
        self.waiting: set[str] = set()
        self.joining: set[str] = set()

    def follow(self) -> None:
        """Take in servers that `urls_file` names newly, as dead ones until they hold the current weights, and forget those that it names no
        more. What is not there, or names no server, changes nothing. Not while requests are under way."""
        named = [] if self.urls_file is None else read_urls(self.urls_file)
        if named and named != self.urls:
            new = set(named) - set(self.urls)
            self.dead, self.joining = (self.dead | new) & set(named), (self.joining | new) & set(named)
            self.waiting &= set(named)
            self.urls = named

    def leave_out(self, url: str) -> None:
        """No request goes to a server that answers and cannot be trusted, for a time that doubles with each turn."""
        self.dead.add(url)
        if self.barred(url):
            return
        if time.monotonic() > self._barred_until.get(url, 0.0) + GOOD_SECONDS:
            del self._faults[url]
        self._barred_until[url] = time.monotonic() + min(FIRST_PAUSE * 2 ** self._faults[url], LONGEST_PAUSE)
        self._faults[url] += 1

    def barred(self, url: str) -> bool:
        """Whether that time is not over."""
        return time.monotonic() < self._barred_until.get(url, 0.0)

    def close(self) -> None:
        """Connections live no longer than one call: nothing to let go of."""

    async def _post(
        self, client: httpx.AsyncClient, url: str, path: str, body: Any = None, seconds: float | None = None, optional: bool = False
    ) -> Any:
        """What the server answers; None from one that lacks an `optional` route. WeightSyncError when it answers with an error; its kinds
        ServerTimeout and NoAnswer when it does not."""
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
        return await self._control(client.post(f"{url}{path}", json=body, timeout=timeout), url, path, seconds, optional)

    async def _get(self, client: httpx.AsyncClient, url: str, path: str, seconds: float | None = None) -> Any:
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
        return await self._control(client.get(f"{url}{path}", timeout=timeout), url, path, seconds)

    async def _control(
        self, request: Coroutine[Any, Any, httpx.Response], url: str, path: str, seconds: float | None, optional: bool = False
    ) -> Any:
        try:
            answer = await request
        except httpx.TimeoutException as error:
            raise ServerTimeout(f"{self._name(url)} did not answer {path} within {seconds or self.timeout:g} s") from error
        except httpx.HTTPError as error:
            raise NoAnswer(f"{self._name(url)} did not answer {path}: {error!r}") from error
        if answer.status_code == 404 and optional:
            return None
        if answer.status_code != 200:
            kind = NoAnswer if answer.status_code in OF_PROXIES else WeightSyncError
            raise kind(f"{self._name(url)} answered {answer.status_code} to {path}: {error_text(answer)}")
        content = answer.headers.get("content-type", "")
        try:
            if content.startswith("text/html"):
                raise ValueError(content)
            return answer.json() if content.startswith("application/json") else None
        except ValueError as error:
            raise NoAnswer(f"{self._name(url)} answered no JSON to {path}: {answer.text[:80]!r}") from error

    async def _each(self, verb: Callable[..., Coroutine], *args: Any, only: Collection[str] | None = None) -> list[Any]:
        """`verb` on every living server, or on those in `only`, at once. All of them come to an end before the first error is raised."""
        async with self._client() as client:
            urls = self._alive() if only is None else only
            results = await asyncio.gather(*(verb(client, url, *args) for url in urls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _client(self) -> httpx.AsyncClient:
        # vLLM closes a connection after an error: a request that reuses it at that moment would be lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        spread = Spread(self._moved, limits=limits, trust_env=False, verify=CERTIFICATES)
        return httpx.AsyncClient(timeout=httpx.Timeout(self.timeout, connect=CONNECT_SECONDS), transport=spread, headers=self._headers)

    def _living(self) -> list[str]:
        return [url for url in self.urls if url not in self.dead]

    def _alive(self) -> list[str]:
        if not (living := self._living()):
            raise EngineDeadError("no vLLM server answers any more: " + ", ".join(map(self._name, self.urls)))
        return living

    def _name(self, url: str) -> str:
        return f"vLLM server {url}" + (f" (log {self.logs[url]})" if url in self.logs else "")


class Spread(httpx.AsyncBaseTransport):
    """Requests in turn over several pools of connections. For each request, and at its end, a pool looks through all connections that it
    has, which would be the client's main work with thousands of them."""

    def __init__(self, moved: MovedServers | None = None, **options: Any):
        self._moved, self._options, self._turn = moved, options, 0
        self._pools: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer, by the pool whose turn it is, of the server at its present address."""
        if self._moved is not None:
            self._moved.redirect(request)
        place = self._turn % POOLS
        self._turn += 1
        if place == len(self._pools):
            self._pools.append(httpx.AsyncHTTPTransport(**self._options))
        return await self._pools[place].handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.aclose()


class MovedServers:
    """Addresses of servers that were restarted at another port because another process had taken theirs.

    The launcher writes `file`, a JSON object URL -> present address; every rank reads it. A server keeps its first URL as its name, so
    nothing else changes when it moves.
    """

    def __init__(self, file: Path):
        self._file, self._seen = file, (0, 0)
        self._addresses: dict[str, httpx.URL] = {}

    def write(self, addresses: dict[str, str]) -> None:
        """Replace the file at once, so that no reader sees a part of it."""
        draft = self._file.with_suffix(".part")
        draft.write_text(json.dumps(addresses))
        draft.replace(self._file)

    def forget(self) -> None:
        """Remove what an earlier start wrote."""
        self._file.unlink(missing_ok=True)

    def redirect(self, request: httpx.Request) -> None:
        """Send `request` to the present address of its server."""
        try:
            found = self._file.stat()
            if (found.st_ino, found.st_mtime_ns) != self._seen:
                self._addresses = {url: httpx.URL(address) for url, address in json.loads(self._file.read_text()).items()}
                self._seen = found.st_ino, found.st_mtime_ns
        except (OSError, ValueError):  # no server has moved
            return
        if (address := self._addresses.get(f"{request.url.scheme}://{request.url.netloc.decode()}")) is not None:
            request.url = request.url.copy_with(host=address.host, port=address.port)
            request.headers["host"] = address.netloc.decode()


class ServerTimeout(WeightSyncError):
    """A server that took a request did not answer it in time."""


class NoAnswer(WeightSyncError):
    """A request was broken off, or something else than the server has answered it."""


def read_urls(file: Path) -> list[str]:
    """The addresses in a file, one a line, without repetitions; none when it cannot be read. Lines that begin with # do not count."""
    try:
        lines = [line.strip().rstrip("/") for line in file.read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return list(dict.fromkeys(line for line in lines if line.startswith(("http://", "https://"))))


def named_urls(urls: Sequence[str], file: str | None) -> list[str]:
    """The servers that the file names now; `urls` where it names none."""
    return (read_urls(Path(file)) if file else []) or list(urls)


def check_urls(urls: Sequence[str]) -> None:
    """ValueError that names the servers of `rollout.urls` that do not answer their health check."""

    async def check() -> list[bool]:
        async with httpx.AsyncClient(trust_env=False, verify=CERTIFICATES) as client:
            return await asyncio.gather(*(answers(client, url) for url in urls))

    if silent := [url for url, answered in zip(urls, asyncio.run(check()), strict=True) if not answered]:
        raise ValueError(f"rollout.urls: {', '.join(silent)} does not answer; start it, or leave rollout.urls empty to have one started")


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the server at `url` says that it is well."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS):  # in all; httpx counts from one byte to the next
            return (await client.get(f"{url}/health", timeout=HEALTH_SECONDS)).status_code == 200
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
        return False


def error_text(answer: httpx.Response) -> str:
    """The server's own words in an answer that is an error."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500] or f"status {answer.status_code}"
