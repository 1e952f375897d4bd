"""HTTP requests to vLLM servers, by aiohttp: kept connections for thousands of requests for tokens at once, and a new
connection for each control request.

httpx searches all connections of a pool for each request, which takes milliseconds with hundreds of them.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import math
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megagrpo.platform.process.atomic_file import write_atomically
from megagrpo.platform.process.cleanup.removal import remove

if TYPE_CHECKING:  # imported late, because a rank that does not generate opens 150 files less without it
    import aiohttp

# with thousands of requests, seconds may pass before this process sees that a connection is open
CONNECT_SECONDS = 30.0
MOVED_SECONDS = 0.5  # while a response is pending: between two checks whether its server has moved
HEALTH_SECONDS = 5.0  # timeout of a health check
KEPT_SECONDS = 4.0  # that an idle connection is kept; vLLM closes it after 5 (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
READ_BYTES = 1 << 20  # of a response that are buffered before the socket is paused
JSON = "application/json"
NO_HEADERS: Mapping[str, str] = {}
OnLine = Callable[[bytes], None]  # gets each line of a body as it comes


class ConnectionFailed(Exception):
    """No complete response came: the connection was refused or lost, or something else than HTTP came."""


class Answer(NamedTuple):
    """A response: its status code, its body and its content type."""

    status: int
    content: bytes
    kind: str = ""

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode(errors="replace")

    def error(self) -> str:
        """Return the server's own error message, of an error response."""
        try:
            return str(json.loads(self.content)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return self.text[:500] or f"status {self.status}"


class Connections:
    """Requests to vLLM servers, in one event loop. An asynchronous context manager.

    `post` keeps a connection for the next request. The server may close it at the moment at which a request is sent,
    because of its keep-alive timeout or after an error. The request is then repeated once, on a new connection. That is
    safe: no byte of a response came, a request for tokens changes nothing on a server except its prefix cache, its seed
    gives the same tokens again, and vLLM aborts a request whose connection is closed. `request` keeps no connection,
    and repeats nothing.

    Each request has `timeout` seconds in all, however slowly the response drips. `end` ends all requests to a server.
    With `moved`, requests go to the servers' current addresses, and requests to former ones fail: the process that took
    a server's port may accept a connection and never respond.
    """

    def __init__(self, headers: Mapping[str, str], timeout: float, moved: MovedServers | None = None):
        self._headers, self._timeout, self._moved = headers, timeout, moved
        # (server, its address) -> the deadlines of the requests that were sent there
        self._deadlines: dict[tuple[str, str], set[asyncio.Timeout]] = defaultdict(set)

    async def __aenter__(self) -> Connections:
        self._kept, self._new = self._session(force_close=False), self._session(force_close=True)
        self._following = None if self._moved is None else asyncio.create_task(self._follow_moves())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._following is not None:
            self._following.cancel()
        await self._kept.close()
        await self._new.close()

    def _session(self, force_close: bool) -> aiohttp.ClientSession:
        import aiohttp

        kept = None if force_close else KEPT_SECONDS
        connector = aiohttp.TCPConnector(limit=0, force_close=force_close, keepalive_timeout=kept)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=limits,
            headers={**self._headers, "content-type": JSON},
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BYTES,
        )

    async def post(
        self,
        url: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str] = NO_HEADERS,
        on_line: OnLine | None = None,
        most: int | None = None,
    ) -> Answer:
        """Send a request to the server `url`, with additional `headers`, and return the response. `on_line` gets the
        lines of one with status 200 before it is complete. A body of more than `most` bytes is an error.

        Raises ConnectionFailed, and TimeoutError when the time is over or `end` was called.
        """
        import aiohttp

        address, options = self._address(url, MOVED_SECONDS / 2), dict(data=body, headers=headers)
        async with self._attempt(url, address, self._timeout):
            try:
                return await _send(self._kept, "POST", address + path, options, on_line, most)
            except (aiohttp.ClientConnectionError, ConnectionResetError) as error:
                if not _came_before_a_response(error):
                    raise
                return await _send(self._new, "POST", address + path, options, on_line, most)

    async def request(
        self, url: str, path: str, body: Any = None, method: str = "POST", seconds: float | None = None
    ) -> Answer:
        """Send a control request with a JSON `body`, and return the response. Raises as `post`. `seconds` replace the
        timeout of all requests."""
        import aiohttp

        address, data = self._address(url), None if body is None else json.dumps(body).encode()
        options = dict(data=data, timeout=aiohttp.ClientTimeout(total=None))  # no shorter one for the connection
        async with self._attempt(url, address, seconds or self._timeout):
            return await _send(self._new, method, address + path, options)

    def end(self, url: str, only_at: str | None = None) -> None:
        """End all requests to the server, or only those that were sent to an address. They raise TimeoutError."""
        for (server, address), deadlines in [*self._deadlines.items()]:
            for deadline in [*deadlines] if server == url and address == (only_at or address) else ():
                deadline.reschedule(asyncio.get_running_loop().time())

    async def _follow_moves(self) -> None:
        """End requests to servers that were restarted on another port, until cancelled."""
        while True:
            await asyncio.sleep(MOVED_SECONDS)
            for url, address in [*self._deadlines]:
                if self._address(url, MOVED_SECONDS / 2) != address:
                    self.end(url, only_at=address)

    def _address(self, url: str, age: float = 0.0) -> str:
        return url if self._moved is None else self._moved.address(url, age)

    @asynccontextmanager
    async def _attempt(self, url: str, address: str, seconds: float) -> AsyncIterator[None]:
        """Limit the time of a request, and raise ConnectionFailed for the errors of aiohttp."""
        import aiohttp

        deadlines = self._deadlines[url, address]
        try:
            async with asyncio.timeout(seconds) as deadline:
                deadlines.add(deadline)
                try:
                    yield
                finally:
                    deadlines.discard(deadline)
        except aiohttp.ConnectionTimeoutError as error:
            raise ConnectionFailed(repr(error)) from error
        except TimeoutError as error:
            if self._address(url, MOVED_SECONDS / 2) != address:
                raise ConnectionFailed("the server was restarted on another port before it responded") from error
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConnectionFailed(repr(error)) from error


def _came_before_a_response(error: Exception) -> bool:
    """Whether the server closed or reset the connection before it sent a byte."""
    import aiohttp

    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else it is the begun response
    return isinstance(error, ConnectionResetError) or getattr(error, "errno", None) in (errno.ECONNRESET, errno.EPIPE)


async def _send(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    options: dict[str, Any],
    on_line: OnLine | None = None,
    most: int | None = None,
) -> Answer:
    import yarl

    options |= dict(ssl=_certificates() if url.startswith("https:") else True, allow_redirects=False)
    async with session.request(method, yarl.URL(url, encoded=True), **options) as response:
        if most is not None:
            try:
                await response.content.readexactly(most + 1)
            except asyncio.IncompleteReadError as error:
                return Answer(response.status, error.partial, response.headers.get("content-type", ""))
            raise ValueError(f"a response of more than {most} bytes")
        if on_line is None or response.status != 200:
            return Answer(response.status, await response.read(), response.headers.get("content-type", ""))
        whole, rest = list[bytes](), list[bytes]()  # `rest` has the parts of a line without its end
        async for data in response.content.iter_any():
            whole.append(data)
            rest.append(data)
            if b"\n" in data:
                *lines, last = b"".join(rest).split(b"\n")
                rest = [last]
                for line in lines:
                    on_line(line)
        return Answer(response.status, b"".join(whole))


@functools.cache  # loading them takes longer than a request
def _certificates() -> ssl.SSLContext:
    import certifi

    return ssl.create_default_context(cafile=certifi.where())


async def answers(connections: Connections, url: str, route: str = "/health") -> bool:
    """Whether the server at `url` passes its health check, or responds to another route in the same time.

    The check is repeated once if the server closed the connection, or if this process was starved of CPU: neither
    proves that the server fails.
    """
    for _ in range(2):
        began = time.monotonic()
        try:
            return (await connections.request(url, route, method="GET", seconds=HEALTH_SECONDS)).status == 200
        except ConnectionFailed:
            continue
        except TimeoutError:
            if time.monotonic() - began < HEALTH_SECONDS + 1:
                return False
    return False


def ask(
    url: str,
    path: str,
    body: Any = None,
    method: str = "POST",
    *,
    headers: Mapping[str, str],
    seconds: float,
    moved: MovedServers | None = None,
) -> Answer:
    """Send one control request from a thread without an event loop. Raises as `Connections.request`."""

    async def once() -> Answer:
        async with Connections(headers, seconds, moved) as connections:
            return await connections.request(url, path, body, method)

    return asyncio.run(once())


def healthy(url: str) -> bool:
    """Whether the server at `url` passes its health check, from a thread without an event loop."""
    try:
        return ask(url, "/health", method="GET", headers=NO_HEADERS, seconds=HEALTH_SECONDS).status == 200
    except (ConnectionFailed, TimeoutError):
        return False


class MovedServers:
    """Current addresses of servers that were restarted on another port because another process had taken their port.

    The launcher writes `file`, a JSON object URL -> current address; every rank reads it. A server keeps its first URL
    as its name, so nothing else changes when it moves.
    """

    def __init__(self, file: Path):
        self._file, self._looked = file, -math.inf
        self._addresses: dict[str, str] = {}

    def write(self, addresses: dict[str, str]) -> None:
        """Replace the file atomically, so that no reader sees a partial file."""
        write_atomically(self._file, json.dumps(addresses))

    def forget(self) -> None:
        """Remove the file of an earlier start."""
        remove(self._file)

    def address(self, url: str, age: float = 0.0) -> str:
        """Return the current address of the server `url`, as of at most `age` seconds ago."""
        if time.monotonic() - self._looked >= age:
            self._looked = time.monotonic()
            try:
                self._addresses = {name: str(address) for name, address in json.loads(self._file.read_text()).items()}
            except FileNotFoundError:  # no server has moved
                self._addresses = {}
            except (OSError, ValueError):  # a shared file system may fail for a moment: keep what was read last
                pass
        return self._addresses.get(url, url)
