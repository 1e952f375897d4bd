"""The run's own servers as judges: an OpenAI-compatible address on the loopback, for the reward workers of a rank."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import hmac
import json
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from megagrpo.data.tokens.tokenizer import Tokenizer, read_chat_template
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineError
from megagrpo.engine.load_balancing import Generation
from megagrpo.environments.agents.agent_messages import Refused, plain, read_body
from megagrpo.environments.episodes.text_threads import TextThreads
from megagrpo.loopback import LOOPBACK_ADDRESS
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout, SamplingParams

if TYPE_CHECKING:  # imported late, because a rank that does not generate opens 150 files less without it
    from aiohttp import web

MOST_REQUEST_BYTES = 1 << 23  # of a request
IDLE_SECONDS = 1.0  # without a request, after which a session ends and its health checks with it


@contextmanager
def own_judges(
    engine: VllmEngine,
    rewards: RewardScorer,
    names: Collection[str],
    tokenizer: Tokenizer,
    chat_template: str | None,
    stop_token_ids: tuple[int, ...],
    max_length: int,
) -> Iterator[None]:
    """Tell the reward functions of a run where its own judges `names` are, while the block runs. `policy` judges with
    the weights that the servers have when it is asked, `reference` with those below the adapter. `chat_template` is
    that of the config; a request and its response have `max_length` tokens at most."""
    if "reference" in names and not (engine.adapters or engine.model):
        reason = "these servers have no weights of the reference beside the policy's"
        raise ValueError(f"rewards.functions: args.judge: reference: {reason}; start a server, and name args.url")
    if not names:
        yield
        return
    judges = {name: _Judge(_client(engine, name == "reference")) for name in names}
    loop = asyncio.new_event_loop()
    address = _Address(judges, tokenizer, read_chat_template(chat_template), stop_token_ids, max_length)
    thread = Thread(target=loop.run_forever, name="own judges", daemon=True)
    thread.start()
    try:
        runner = asyncio.run_coroutine_threadsafe(address.open(), loop).result()
        base = f"http://{LOOPBACK_ADDRESS}:{runner.addresses[0][1]}"
        rewards.own_judges = {name: {"url": f"{base}/{name}/v1", "key": address.key} for name in names}
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(address.close(runner), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _client(engine: VllmEngine, is_reference: bool) -> VllmEngine:
    """Return a client of the same servers, in the same state, whose responses may have any weight version."""
    judge = copy.copy(engine)
    judge.reads_no_versions, judge.routes = True, None
    if is_reference:  # a request that names no adapter goes to the weights below it
        judge.model, judge.adapters = None, 0
    return judge


class _Judge:
    """Turns of one engine, in a session that is open while requests are under way."""

    def __init__(self, engine: VllmEngine):
        self._engine, self._count = engine, 0
        self._owner: asyncio.Task[None] | None = None
        self._session: asyncio.Future[Generation]

    async def turn(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> Rollout:
        """Return the judge's response to the prompt. Raises the errors of `VllmEngine.groups`."""
        if self._owner is None or self._owner.done():
            self._session = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._own(self._session))
        owner, work = self._owner, asyncio.ensure_future(self._taken(self._session, prompt, sampling, seed))
        self._count += 1
        try:
            await asyncio.wait((owner, work), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                owner.result()  # the session failed
            return await work
        finally:
            self._count -= 1
            work.cancel()

    async def close(self) -> None:
        """End the session, if one is open."""
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.wait([self._owner])

    async def _own(self, opened: asyncio.Future[Generation]) -> None:
        async with self._engine.session() as session:
            opened.set_result(session)
            await asyncio.sleep(IDLE_SECONDS)
            while self._count:
                await asyncio.sleep(IDLE_SECONDS)
            self._owner = None  # before the session closes: the next request opens another one

    @staticmethod
    async def _taken(
        opened: asyncio.Future[Generation], prompt: Prompt, sampling: SamplingParams, seed: int
    ) -> Rollout:
        session = await asyncio.shield(opened)
        (home,) = session.open(1)
        try:
            return await session.turn(prompt, sampling, seed, home)
        finally:
            session.close(home)


class _Address:
    """The address of the judges, by their names. Requests need its `key`."""

    def __init__(
        self,
        judges: dict[str, _Judge],
        tokenizer: Tokenizer,
        template: str | None,
        stop_token_ids: tuple[int, ...],
        max_length: int,
    ):
        self._judges, self._tokenizer, self._template = judges, tokenizer, template
        self._stop_token_ids, self._max_length, self.key = stop_token_ids, max_length, secrets.token_urlsafe(24)
        self._threads = TextThreads()
        tokenizer.encode("", add_special_tokens=False)  # resets truncation, which must not happen beside other threads

    async def open(self) -> web.AppRunner:
        """Listen on a free port."""
        from aiohttp import web

        app = web.Application(client_max_size=MOST_REQUEST_BYTES)
        app.router.add_post("/{name}/v1/chat/completions", self._answered)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK_ADDRESS, 0, backlog=1024).start()
        return runner

    async def close(self, runner: web.AppRunner) -> None:
        """Refuse requests from now on, and end the sessions."""
        await runner.cleanup()
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))

    async def _answered(self, request: web.Request) -> web.Response:
        from aiohttp import web

        name, sent = request.match_info["name"], request.headers.get("Authorization", "")
        try:
            if name not in self._judges or not hmac.compare_digest(sent.encode(), f"Bearer {self.key}".encode()):
                raise Refused("wrong key or judge", "invalid_api_key", status=401)
            return web.json_response(await self._answer(self._judges[name], await request.read()))
        except (Refused, ValueError, EngineError) as error:
            status = error.status if isinstance(error, Refused) else 503 if isinstance(error, EngineError) else 400
            return web.json_response({"error": {"message": str(error)}}, status=status)

    async def _answer(self, judge: _Judge, content: bytes) -> dict[str, Any]:
        prompt, sampling = await self._threads.run(len(content), lambda: self._read(content))
        rollout = await judge.turn(prompt, sampling, int.from_bytes(hashlib.sha256(content).digest()[:4]))
        message = {"role": "assistant", "content": rollout.text}
        usage = {"prompt_tokens": len(prompt.token_ids), "completion_tokens": rollout.length}
        return {"choices": [{"index": 0, "message": message, "finish_reason": rollout.finish_reason}], "usage": usage}

    def _read(self, content: bytes) -> tuple[Prompt, SamplingParams]:
        """Return prompt and sampling of a request of `JudgeClient`. Raises Refused or ValueError."""
        body = read_body(content)
        try:
            messages, most = [plain(message) for message in body["messages"]], int(body["max_tokens"])
            constraint = "json", json.dumps(body["response_format"]["json_schema"]["schema"])
        except (KeyError, TypeError) as error:
            raise Refused(f"the request is malformed: {error!r}", "invalid_request") from error
        kwargs, temperature = body.get("chat_template_kwargs"), float(body.get("temperature") or 0.0)
        text = self._tokenizer.rendered(messages, None, self._template, (), kwargs)
        text = "\n\n".join(message["content"] for message in messages) if text is None else text
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if len(ids) + most > self._max_length:
            reason = f"{len(ids)} tokens and args.max_tokens {most} are above the servers' limit of {self._max_length}"
            raise Refused(f"{reason}; lower args.max_chars", "context_length_exceeded")
        return Prompt(0, ids, messages), SamplingParams(temperature, most, self._stop_token_ids, constraint=constraint)
