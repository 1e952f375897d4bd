"""The address that agents talk to: an OpenAI-compatible server on the loopback, in the generating rank's event loop.

Each conversation has a key, which its agent gives as its API key. A key is valid while its conversation is under way.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megagrpo.engine.requests import OnTokens
from megagrpo.environments.agents import chat_completions, responses_api
from megagrpo.environments.agents.agent_requests import POLICY_NAME, Ask, Reply
from megagrpo.environments.agents.text_stream import TextStream
from megagrpo.environments.agents.trajectory import Refused, Trajectory, read_json
from megagrpo.environments.episodes.tool_calls import CALL_OPENING
from megagrpo.loopback import LOOPBACK_ADDRESS
from megagrpo.rewards.functions.text_rewards import encodable
from megagrpo.types import Prompt, Rollout, SamplingParams

if TYPE_CHECKING:  # imported late, because a rank that does not generate opens 150 files less without it
    from aiohttp import web

MAX_BODY = 1 << 26  # bytes of a request
ROUTES = "/v1/chat/completions", "/v1/responses", "/v1/models"
Call = dict[str, Any]
# (prompt, sampling, number of the turn in its conversation, what gets its tokens as they come, if anything) -> the
# policy's next turn, and the seconds that it has waited for a slot of its server.
TakeTurn = Callable[[Prompt, SamplingParams, int, OnTokens | None], Awaitable[tuple[Rollout, float]]]
# The text and the tool calls of a turn: (prompt, rollout, tools). An invalid call has only `error`.
ReadCalls = Callable[[Prompt, Rollout, Sequence[Call]], Awaitable[tuple[str, list[Call]]]]


class Seat:
    """A conversation at the address. `broken` gets the error with which the engine failed; it ends the run, or is
    handled there. Any other error is the request's: the agent gets it. A tool call begins with the text `opening`;
    None: it is not known how."""

    def __init__(
        self,
        trajectory: Trajectory,
        sampling: SamplingParams,
        turn: TakeTurn,
        read_calls: ReadCalls,
        opening: str | None = CALL_OPENING,
    ):
        self.trajectory, self._sampling, self._turn, self._read_calls = trajectory, sampling, turn, read_calls
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening, self._tasks = opening, set[asyncio.Task[Reply]]()
        self._failure: Exception | None = None  # of the engine

    def read(self, api: Any, body: dict[str, Any]) -> Ask:
        """Return what the body of a request asks for. Raises Refused."""
        try:
            ask: Ask = api.read(body, self._sampling)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"the request is malformed: {error!r}", "invalid_request") from error
        self.trajectory.counts.update(f"ignored/{name}" for name in ask.ignored)
        return ask

    async def stream(self, ask: Ask) -> AsyncGenerator[str | Reply]:
        """Yield the text of the policy's turn as it comes if the request asks for a stream, then the turn. Raises
        Refused."""
        texts = asyncio.Queue[str | None]()
        task = asyncio.ensure_future(self.reply(ask, texts.put_nowait if ask.stream else None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: texts.put_nowait(None))
        try:
            while (text := await texts.get()) is not None:
                yield text
            yield await task
        except (Refused, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            if error is not self._failure:
                raise Refused(f"the request cannot be used: {error!r}", "invalid_request") from error
            if not self.broken.done():
                self.broken.set_exception(error)
            raise Refused(f"the engine failed: {error}", "server_error", status=500) from error
        finally:
            task.cancel()

    async def _of_engine[T](self, work: Awaitable[T]) -> T:
        try:
            return await work
        except Exception as error:
            self._failure = error
            raise

    async def reply(self, ask: Ask, send: Callable[[str], None] | None = None, is_limited: bool = True) -> Reply:
        """Take a turn of the policy. `send` gets its text as it comes. Raises Refused, and the errors of the engine.
        Unless it `is_limited`, the turn may be one more than `multi_turn.max_turns`."""
        trajectory, number = self.trajectory, self.trajectory.turns
        start = trajectory.start(ask.messages, ask.tools, is_limited)
        limit = min(trajectory.room(start), self._sampling.max_tokens, ask.max_tokens or self._sampling.max_tokens)
        sampling = replace(self._sampling, max_tokens=limit)
        if ask.stop:
            sampling = replace(sampling, stop=(*sampling.stop, *ask.stop), include_stop=False)
        prompt = replace(trajectory.prompt, token_ids=start.context, messages=ask.messages)
        has_calls = bool(ask.tools) and ask.parses_calls
        stream = TextStream(trajectory.decode, sampling.stop, self._opening if has_calls else "")

        def on_tokens(first: int, ids: list[int]) -> None:
            if (text := stream.add(first, ids)) and send is not None:
                send(text)

        asked, begun = time.time(), time.monotonic()
        rollout, queued = await self._of_engine(self._turn(prompt, sampling, number, on_tokens if send else None))
        times = dict(began=asked, generated=time.monotonic() - begun, queued=queued)
        content, calls = rollout.text, list[Call]()
        if has_calls:
            text, found = await self._of_engine(self._read_calls(prompt, rollout, ask.tools))
            calls = [call for call in found if "error" not in call]
            trajectory.counts.update({"invalid_calls": len(found) - len(calls)} if len(calls) < len(found) else {})
            content = text if calls else content
        try:
            content, rest = stream.finish(content)
        except ValueError as error:
            trajectory.counts["broken_streams"] += 1
            raise Refused(str(error), "server_error", status=500) from error
        reply = Reply(
            ask=ask,
            content=content,
            calls=[_numbered(call, f"{trajectory.index}_{number}_{i}") for i, call in enumerate(calls)],
            finish_reason="tool_calls" if calls else rollout.finish_reason,
            prompt_tokens=len(start.context),
            completion_tokens=rollout.length,
        )
        trajectory.record(start, rollout, reply.message, **times)
        if rest and send is not None:
            send(rest)
        return reply

    def close(self) -> None:
        """Cancel the turns that are still under way."""
        for task in list(self._tasks):
            task.cancel()
        self.broken.cancel()


def _numbered(call: Call, number: str) -> Call:
    arguments = encodable(json.dumps(call["arguments"], ensure_ascii=False))
    function = {"name": encodable(call["name"]), "arguments": arguments}
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
        completions, responses, models = ROUTES
        app.router.add_post(completions, self._handler(chat_completions))
        app.router.add_post(responses, self._handler(responses_api))
        app.router.add_get(models, self._models)
        app.router.add_get(f"{models}/{{name:.+}}", self._models)
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
            reason = "no conversation under way has this key; use the key of OPENAI_API_KEY or client.api_key"
            raise Refused(f"{reason}, which is valid until the agent's function returns", "invalid_api_key", status=401)
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
                body = read_json(await request.text())
            except (ValueError, RecursionError):
                body = None
            if not isinstance(body, dict):
                raise Refused("the body is no JSON object", "invalid_json")
            ask = seat.read(api, body)
            async with aclosing(seat.stream(ask)) as parts:
                if ask.stream:
                    return await _streamed(request, parts, api.Events(ask, body))
                (reply,) = [part async for part in parts]
            return web.json_response(api.response(reply))

        return handle


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


async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Give errors in OpenAI's format."""
    from aiohttp import web

    try:
        return await handler(request)
    except Refused as refused:
        error = refused
    except web.HTTPException as other:
        text = f"{request.method} {request.path}: {other.reason}; the address has {', '.join(ROUTES)}"
        error = Refused(text, "not_found", other.status)
    return web.json_response(_described(error), status=error.status)


def _described(error: Refused) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "code": error.code, "param": error.param}}
