"""The address that agents talk to: an OpenAI-compatible server on the loopback, in the generating rank's event loop.

Each conversation has a key, which its agent gives as its API key. A key is valid while its conversation is under way.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.environments.agents import chat_completions, responses_api
from megagrpo.environments.agents.agent_requests import POLICY_NAME, Ask, Reply
from megagrpo.environments.agents.trajectory import Refused, Trajectory
from megagrpo.platform.process.loopback import LOOPBACK_ADDRESS
from megagrpo.types import Prompt, Rollout, SamplingParams

if TYPE_CHECKING:  # imported late, because a rank that does not generate opens 150 files less without it
    from aiohttp import web

MAX_BODY = 1 << 26  # bytes of a request
Call = dict[str, Any]
# (prompt, sampling, number of the turn in its conversation) -> the policy's next turn, and the seconds that it has
# waited for a slot of its server.
TakeTurn = Callable[[Prompt, SamplingParams, int], Awaitable[tuple[Rollout, float]]]
# The text and the tool calls of a turn: (prompt, rollout, tools). An invalid call has only `error`.
ReadCalls = Callable[[Prompt, Rollout, Sequence[Call]], Awaitable[tuple[str, list[Call]]]]


class Seat:
    """A conversation at the address. `broken` gets the error with which the engine failed."""

    def __init__(self, trajectory: Trajectory, sampling: SamplingParams, turn: TakeTurn, read_calls: ReadCalls):
        self.trajectory, self._sampling, self._turn, self._read_calls = trajectory, sampling, turn, read_calls
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Reply]] = set()

    async def answer(self, api: Any, body: dict[str, Any]) -> tuple[Ask, Reply]:
        """Return what the body of a request asks for, and the policy's turn. Raises Refused."""
        try:
            ask: Ask = api.read(body, self._sampling)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"the request is malformed: {error!r}", "invalid_request") from error
        self.trajectory.counts.update(f"ignored/{name}" for name in ask.ignored)
        task = asyncio.ensure_future(self.reply(ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return ask, await task
        except (Refused, asyncio.CancelledError):
            raise
        except Exception as error:  # of the engine: it ends the run, or is handled there
            if not self.broken.done():
                self.broken.set_exception(error)
            raise Refused(f"the engine failed: {error}", "server_error", status=500) from error

    async def reply(self, ask: Ask) -> Reply:
        """Take a turn of the policy. Raises Refused, and the errors of the engine."""
        trajectory, number = self.trajectory, self.trajectory.turns
        start = trajectory.start(ask.messages, ask.tools)
        limit = min(trajectory.room(start), self._sampling.max_tokens, ask.max_tokens or self._sampling.max_tokens)
        sampling = replace(self._sampling, max_tokens=limit)
        if ask.stop:
            sampling = replace(sampling, stop=(*sampling.stop, *ask.stop), include_stop=False)
        prompt = replace(trajectory.prompt, token_ids=start.context, messages=ask.messages)
        asked, begun = time.time(), time.monotonic()
        rollout, queued = await self._turn(prompt, sampling, number)
        times = dict(began=asked, generated=time.monotonic() - begun, queued=queued)
        content, calls = rollout.text, list[Call]()
        if ask.tools and ask.parses_calls:
            text, found = await self._read_calls(prompt, rollout, ask.tools)
            calls = [call for call in found if "error" not in call]
            trajectory.counts.update({"invalid_calls": len(found) - len(calls)} if len(calls) < len(found) else {})
            content = text if calls else content
        reply = Reply(
            content=content,
            calls=[_numbered(call, f"{trajectory.index}_{number}_{i}") for i, call in enumerate(calls)],
            finish_reason="tool_calls" if calls else rollout.finish_reason,
            prompt_tokens=len(start.context),
            completion_tokens=rollout.length,
            number=secrets.token_hex(8),
            created=int(time.time()),
            model=ask.model,
        )
        trajectory.record(start, rollout, reply.message, **times)
        return reply

    def close(self) -> None:
        """Cancel the turns that are still under way."""
        for task in list(self._tasks):
            task.cancel()
        self.broken.cancel()


def _numbered(call: Call, number: str) -> Call:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {"id": f"call_{number}", "type": "function", "function": function}


class Address:
    """The server of the conversations of one event loop. It is open while one is under way; `url` is its base URL."""

    url: str

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}  # by key
        self._opens = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def _open(self) -> web.AppRunner:
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY, middlewares=[web.middleware(_errors)])
        app.router.add_post("/v1/chat/completions", self._handler(chat_completions))
        app.router.add_post("/v1/responses", self._handler(responses_api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK_ADDRESS, 0).start()
        self.url = f"http://{LOOPBACK_ADDRESS}:{runner.addresses[0][1]}/v1"
        return runner

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
                await runner.cleanup()

    def _seat(self, request: web.Request) -> Seat:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (seat := self.seats.get(key)) is None:
            raise Refused("no conversation under way has this key", "invalid_api_key", status=401)
        return seat

    async def _models(self, request: web.Request) -> web.Response:
        from aiohttp import web

        self._seat(request)
        name = request.match_info.get("name")
        card = {"id": name or POLICY_NAME, "object": "model", "created": 0, "owned_by": "megagrpo"}
        return web.json_response(card if name else {"object": "list", "data": [card]})

    def _handler(self, api: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            from aiohttp import web

            seat = self._seat(request)
            try:
                body = await request.json()
            except ValueError:
                body = None
            if not isinstance(body, dict):
                raise Refused("the body is no JSON object", "invalid_json")
            ask, reply = await seat.answer(api, body)
            if not ask.stream:
                return web.json_response(api.response(reply))
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await stream.prepare(request)
            for name, data in api.events(reply, body):
                head = "" if name is None else f"event: {name}\n"
                await stream.write(f"{head}data: {json.dumps(data)}\n\n".encode())
            if api is chat_completions:
                await stream.write(b"data: [DONE]\n\n")
            return stream

        return handle


async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Give errors in OpenAI's format."""
    from aiohttp import web

    try:
        return await handler(request)
    except Refused as error:
        text, code, status, param = str(error), error.code, error.status, error.param
    except web.HTTPException as error:
        text, code, status, param = f"{request.method} {request.path}: {error.reason}", "not_found", error.status, None
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.json_response({"error": {"message": text, "type": kind, "code": code, "param": param}}, status=status)
