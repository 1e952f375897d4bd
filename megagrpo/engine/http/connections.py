"""Kept HTTP connections to vLLM servers for thousands of requests at once, by aiohttp.

httpx searches all connections of a pool for each request, which takes milliseconds with hundreds of them.
"""

from __future__ import annotations

import asyncio
import errno
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from megagrpo.engine.http.server_calls import CERTIFICATES, CONNECT_SECONDS, MOVED_SECONDS, MovedServers

if TYPE_CHECKING:  # imported late, because a rank that does not generate opens 150 files less without it
    import aiohttp

KEPT_SECONDS = 4.0  # that an idle connection is kept; vLLM closes it after 5 (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
READ_BYTES = 1 << 20  # of a response that are buffered before the socket is paused
JSON = {"content-type": "application/json"}
NO_HEADERS: Mapping[str, str] = {}
OnLine = Callable[[bytes], None]  # gets each line of a body as it comes


class ConnectionFailed(Exception):
    """No complete response came: the connection was refused or lost, or something else than HTTP came."""


class Answer(NamedTuple):
    """A response: its status code and its body."""

    status: int
    content: bytes


class Connections:
    """POST requests to vLLM servers, in one event loop. An asynchronous context manager.

    A connection is kept for the next request. The server may close it at the moment at which a request is sent, because
    of its keep-alive timeout or after an error. The request is then repeated once, on a new connection. That is safe:
    no byte of a response came, a request for tokens changes nothing on a server except its prefix cache, its seed
    gives the same tokens again, and vLLM aborts a request whose connection is closed.

    Each request has `timeout` seconds in all, however slowly the response drips. `end` ends all requests to a server.
    With `moved`, requests go to the servers' current addresses, and `follow_moves` ends requests to former ones.
    """

    def __init__(self, headers: Mapping[str, str], timeout: float, moved: MovedServers | None = None):
        self._headers, self._timeout, self._moved = headers, timeout, moved
        # (server, its address) -> the deadlines of the requests that were sent there
        self._deadlines: dict[tuple[str, str], set[asyncio.Timeout]] = defaultdict(set)

    async def __aenter__(self) -> Connections:
        self._kept, self._new = self._session(force_close=False), self._session(force_close=True)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._kept.close()
        await self._new.close()

    def _session(self, force_close: bool) -> aiohttp.ClientSession:
        import aiohttp

        kept = None if force_close else KEPT_SECONDS
        connector = aiohttp.TCPConnector(limit=0, ssl=CERTIFICATES, force_close=force_close, keepalive_timeout=kept)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=limits,
            headers={**self._headers, **JSON},
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BYTES,
        )

    async def post(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS, on_line: OnLine | None = None
    ) -> Answer:
        """Send a request to the server `url`, with additional `headers`, and return the response. `on_line` gets the
        lines of one with status 200 before it is complete.

        Raises ConnectionFailed, and TimeoutError when the time is over or `end` was called.
        """
        import aiohttp

        address = self._address(url)
        try:
            async with self._deadline(url, address):
                try:
                    return await _post(self._kept, address + path, body, headers, on_line)
                except (aiohttp.ClientConnectionError, ConnectionResetError) as error:
                    if not _came_before_a_response(error):
                        raise
                    return await _post(self._new, address + path, body, headers, on_line)
        except aiohttp.ConnectionTimeoutError as error:
            raise ConnectionFailed(repr(error)) from error
        except TimeoutError as error:
            if self._address(url) != address:
                raise ConnectionFailed("the server was restarted on another port before it responded") from error
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConnectionFailed(repr(error)) from error

    def end(self, url: str, only_at: str | None = None) -> None:
        """End all requests to the server, or only those that were sent to an address. They raise TimeoutError."""
        for (server, address), deadlines in [*self._deadlines.items()]:
            for deadline in [*deadlines] if server == url and address == (only_at or address) else ():
                deadline.reschedule(asyncio.get_running_loop().time())

    async def follow_moves(self) -> None:
        """End requests to servers that were restarted on another port, until cancelled. The process that took a
        server's port may accept a connection and never respond."""
        while self._moved is not None:
            await asyncio.sleep(MOVED_SECONDS)
            for url, address in [*self._deadlines]:
                if self._address(url) != address:
                    self.end(url, only_at=address)

    def _address(self, url: str) -> str:
        moved = None if self._moved is None else self._moved.address(url, MOVED_SECONDS / 2)
        return url if moved is None else str(moved)

    @asynccontextmanager
    async def _deadline(self, url: str, address: str) -> AsyncIterator[None]:
        async with asyncio.timeout(self._timeout) as deadline:
            deadlines = self._deadlines[url, address]
            deadlines.add(deadline)
            try:
                yield
            finally:
                deadlines.discard(deadline)


def _came_before_a_response(error: Exception) -> bool:
    """Whether the server closed or reset the connection before it sent a byte."""
    import aiohttp

    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else it is the begun response
    return isinstance(error, ConnectionResetError) or getattr(error, "errno", None) in (errno.ECONNRESET, errno.EPIPE)


async def _post(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], on_line: OnLine | None
) -> Answer:
    import yarl

    async with session.post(yarl.URL(url, encoded=True), data=body, headers=headers) as response:
        if on_line is None or response.status != 200:
            return Answer(response.status, await response.read())
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
