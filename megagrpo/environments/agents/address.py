"""The address that agents talk to: an OpenAI-compatible server in the generating rank's event loop, on the loopback
unless `multi_turn.agent` names another interface.

Each conversation has a key, which its agent gives as its API key. A key is valid while its conversation is under way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.environments.agents import chat_completions, responses_api
from megagrpo.environments.agents.agent_messages import Refused
from megagrpo.environments.agents.agent_requests import POLICY_NAME, Reply
from megagrpo.environments.agents.seat import Seat
from megagrpo.environments.programs.listening import Listening, unix_socket
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.platform.process.terminal import get_logger

if TYPE_CHECKING:  # imported late, because a rank that does not generate opens 150 files less without it
    from aiohttp import web

ROUTES = "/v1/chat/completions", "/v1/responses", "/v1/models"
HEAD_SECONDS = 30.0  # within which a new connection must send the head of a request, or an idle one the next request
MOST_IDLE = 256  # connections without a request that has a valid key; the oldest one is closed for a new one
REST_SECONDS = 2.0  # for which the rest of a refused body is dropped, if its key is valid
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's clients
log = get_logger(__name__)


class Address:
    """The server of the conversations of one event loop. It is open while one is under way; `url` is its base URL, or
    `unix:` and the path of its socket."""

    url: str

    def __init__(self, listening: Listening | None = None) -> None:
        self._listening = listening or Listening()
        self.seats: dict[str, Seat] = {}  # by key
        self._opens = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server
        self._path: Path | None = None  # of a Unix socket
        self._busy = set[object]()  # connections with a request that has a valid key

    async def _open(self) -> web.AppRunner:
        from aiohttp import web

        quiet = logging.Logger(__name__, logging.CRITICAL + 1)  # aiohttp logs a traceback for each malformed request

        @web.middleware
        async def answered(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._answered(request, handler)

        app = web.Application(client_max_size=0, middlewares=[answered])
        completions, responses, models = ROUTES
        app.router.add_post(completions, self._handler(chat_completions))
        app.router.add_post(responses, self._handler(responses_api))
        app.router.add_get(models, self._models)
        app.router.add_get(f"{models}/{{name:.+}}", self._models)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet,
            shutdown_timeout=1.0,
            handler_cancellation=True,
            keepalive_timeout=HEAD_SECONDS,
            lingering_time=0.0,  # the body of a request with a wrong key is not read
        )
        await runner.setup()
        loop, make = asyncio.get_running_loop(), lambda: self._connection(runner)
        if self._listening.folder is not None:
            self._path, bound = unix_socket(self._listening.folder)
            self.url = f"unix:{self._path}"
            self._listener = await loop.create_unix_server(make, sock=bound, backlog=1024)
            return runner
        self._listener = await loop.create_server(
            make,
            self._listening.address,
            0,
            backlog=1024,
            ssl=self._listening.context,
            ssl_handshake_timeout=None if self._listening.context is None else HEAD_SECONDS,
        )
        scheme = "http" if self._listening.context is None else "https"
        self.url = f"{scheme}://{self._listening.host}:{self._listener.sockets[0].getsockname()[1]}/v1"
        return runner

    def _connection(self, runner: web.AppRunner) -> asyncio.Protocol:
        """Return the protocol of a new connection, after closing the oldest idle one if there are too many."""
        assert runner.server is not None, "the runner is set up"
        idle = [one for one in runner.server.connections if one not in self._busy]
        if len(idle) >= MOST_IDLE:
            idle[0].force_close()
        return runner.server()

    @asynccontextmanager
    async def seated(self, seat: Seat) -> AsyncIterator[str]:
        """Let an agent talk to `seat`, with the key that this returns."""
        key = secrets.token_urlsafe(24)
        self.seats[key] = seat
        try:
            async with self._opens:
                self._runner = self._runner or await self._open()
            yield key
        finally:
            del self.seats[key]
            seat.close()
            if not self.seats and self._runner is not None:
                runner, self._runner = self._runner, None
                self._listener.close()
                await runner.cleanup()
                if self._path is not None:
                    remove(self._path)

    def _seat(self, request: web.Request) -> Seat:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        seat = self.seats.get(key.strip()) if scheme.lower() == "bearer" else None
        if seat is None:
            reason = "no conversation under way has this key; use the key of OPENAI_API_KEY or client.api_key"
            raise Refused(f"{reason}, which is valid until the agent's function returns", "invalid_api_key", status=401)
        self._busy.add(request.protocol)
        return seat

    async def _models(self, request: web.Request) -> web.Response:
        from aiohttp import web

        roles, name = self._seat(request).trajectory.roles, request.match_info.get("name")
        names = [name] if name else [f"{POLICY_NAME}:{role}" for role in roles] or [POLICY_NAME]
        cards = [{"id": each, "object": "model", "created": 0, "owned_by": "megagrpo"} for each in names]
        return web.json_response(cards[0] if name else {"object": "list", "data": cards})

    def _handler(self, api: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            from aiohttp import web

            seat = self._seat(request)
            is_retry = request.headers.get(RETRY_HEADER, "0") != "0"
            ask, body, start = await seat.read(api, request.content_length, request.content.iter_any, is_retry)
            async with aclosing(seat.stream(ask, start)) as parts:
                if ask.stream:
                    return await _streamed(request, parts, api.Events(ask, body))
                async for part in parts:
                    assert isinstance(part, Reply), "only a stream has texts"
                    response = web.json_response(api.response(part))
                    await response.prepare(request)
                    await response.write_eof()  # here, because the turn is recorded when the agent has it
            return response

        return handle

    async def _answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Give errors in OpenAI's format. A refused request whose body has not come closes its connection."""
        from aiohttp import web

        try:
            return await handler(request)
        except Refused as refused:
            error = refused
        except web.HTTPException as other:
            text = f"{request.method} {request.path}: {other.reason}; the address has {', '.join(ROUTES)}"
            error = Refused(text, "not_found", other.status)
        except (OSError, asyncio.CancelledError):
            raise
        except Exception as unexpected:
            log.exception("multi_turn.agent: %s %s failed", request.method, request.path)
            error = Refused(f"the address failed: {unexpected!r}", "server_error", status=500)
        finally:
            has_key = request.protocol in self._busy
            self._busy.discard(request.protocol)
        if has_key:  # a client that still sends when the connection is closed does not get the error
            with suppress(Exception):  # malformed, too slow, or the client has left
                async with asyncio.timeout(REST_SECONDS):
                    async for _ in request.content.iter_any():
                        pass
        response = web.json_response(_described(error), status=error.status)
        if error.status == 401 or not request.content.is_eof():
            response.force_close()
        return response


async def _streamed(request: web.Request, parts: AsyncGenerator[str | Reply], events: Any) -> web.StreamResponse:
    """Send a turn as server-sent events. An error before its first text is raised, a later one is an event."""
    from aiohttp import web

    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        async for part in parts:
            if not stream.prepared:
                await stream.prepare(request)
            for name, data in events.text(part) if isinstance(part, str) else events.end(part):
                await _send(stream, data, name)
    except Refused as error:
        if not stream.prepared:
            raise
        await _send(stream, {"type": "error", **_described(error)}, events.error_name)
    if events.last:
        await stream.write(events.last)
    return stream


async def _send(stream: web.StreamResponse, data: dict[str, Any], name: str | None) -> None:
    head = "" if name is None else f"event: {name}\n"
    await stream.write(f"{head}data: {json.dumps(data)}\n\n".encode())


def _described(error: Refused) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "code": error.code, "param": error.param}}
