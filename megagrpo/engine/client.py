"""The client of one or several vLLM servers: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from collections.abc import Generator as Stream
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from operator import itemgetter

from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.engine.http.connections import HEALTH_SECONDS, Answer, ConnectionFailed, Connections, answers
from megagrpo.engine.http.protocol import EngineError, EngineInterrupted, Generator, Group, derive_seed
from megagrpo.engine.image_uploads import ImageUploads
from megagrpo.engine.load_balancing import READING_THREADS, Generation, Home, Tools, first_error, gather, stream
from megagrpo.engine.requests import GroupRequest, Request, longest_first
from megagrpo.engine.response_reader import Reader
from megagrpo.engine.responses import InvalidResponse, Response, Span, joined
from megagrpo.engine.server_slots import Slots
from megagrpo.engine.server_updates import LOOK_SECONDS, Updates, adapter_name
from megagrpo.types import Prompt, Rollout, SamplingParams, WeightSyncError

GENERATE = "/inference/v1/generate"
BYTES_PER_TOKEN = 100  # of a body, about
# (session, home, index of the prompt, number of the response in its group) -> the response
Respond = Callable[[Generation, Home, int, int], Coroutine[None, None, Rollout]]
ATTEMPTS_PER_SERVER = 3  # failed attempts at a response before the error; per server if servers may return


@dataclass(eq=False, repr=False)
class VllmEngine(Updates, Generator):
    """Generates rollouts on vLLM servers that all hold the same weights: one request per response.

    `decode` turns response ids into text, in any thread. Each server works on up to `max_num_seqs` sequences of all
    `clients` that share the servers; `Generation` distributes requests, `Slots` their number. `client` is this one's
    number. When a server stops responding, its requests go to other servers. It gets requests again once it has the
    current weights. `model` is the model name to request, such as an adapter that the servers started with. With
    `any_version` the weight versions of responses are not checked, because other clients may have updated the weights;
    with `reads_no_versions` they are not even read, so that a response may come from any weights. With
    `longest_first` the prompts with the longest responses in earlier visits (`Prompt.expected_length`) begin first. A
    server has `copies` data-parallel copies, and a conversation stays with one of them. With `routes` rollouts
    have the experts of their tokens, which the servers must send. With `keeps_images` servers keep the pixels of
    images, which are sent to each of them once. All other options are those of `Updates`.

    `groups` is thread-safe. With `in_flight` it may also run during a weight update.
    """

    decode: Callable[[Sequence[int]], str]
    _: KW_ONLY
    max_num_seqs: int = 256
    copies: int = 1
    clients: int = 1
    client: int = 0
    model: str | None = None
    any_version: bool = False
    reads_no_versions: bool = False
    longest_first: bool = False
    routes: RouteShape | None = None
    keeps_images: bool = False
    _uploads: ImageUploads = field(default_factory=ImageUploads, init=False)
    # the task of each generation, for `interrupt`
    _under_way: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    # request id of each request in flight -> `Prompt.position`, and the weight version when it was sent
    _in_flight: dict[str, tuple[int | None, int]] = field(default_factory=dict, init=False)
    # `Prompt.position` of the prompts whose responses are truncated
    _cut: set[int] = field(default_factory=set, init=False)

    # -- generation

    def groups(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        seed: int,
        on_begun: Callable[[], None] = lambda: None,
    ) -> Stream[Group]:
        """Generate `n` rollouts of each prompt, or as many as it asks for; see `Generator.groups`. A prompt's seed
        depends on `seed`, its prompt_id and its occurrence, and the seed of a response also on its number in the group.
        A prompt may have a seed of its own.

        `on_begun` is called, perhaps repeatedly, when all responses are on servers and one has room. It must not block.

        Raises EngineDeadError when no server is left, EngineStarved when all that remain need weights. Raises
        EngineInterrupted after `interrupt`, EngineError when a server rejects a request or responds inconsistently.
        """
        return self.converse(prompts, n, self.responses(prompts, n, sampling, seed), on_begun)

    def responses(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int) -> Respond:
        """Return what gives `converse` the responses of `groups`."""
        groups = [
            GroupRequest(prompt, size, sampling, _seed_of_group(prompt, size, seed), self.weight_version)
            for prompt in prompts
            for size in [prompt.group_size(n)]
        ]

        def respond(session: Generation, home: Home, index: int, number: int) -> Coroutine[None, None, Rollout]:
            return session.respond(Request(groups[index], number), home)

        return respond

    def extend(
        self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Rollout]:
        """Generate one rollout per prompt, in order, each with its limits and seed. Raises the errors of `groups`."""

        def respond(session: Generation, home: Home, index: int, _: int) -> Coroutine[None, None, Rollout]:
            return session.turn(prompts[index], sampling[index], seeds[index], home)

        return [rollout for _, (rollout,) in sorted(self.converse(prompts, 1, respond), key=itemgetter(0))]

    def converse(
        self, prompts: Sequence[Prompt], n: int, respond: Respond, on_begun: Callable[[], None] = lambda: None
    ) -> Stream[Group]:
        """Run `respond(session, home, index, number)` for `n` responses to each prompt, and yield each group as soon as
        it is finished. `index` is the prompt's index, `number` that of the response in its group. `respond` takes turns
        with `session.turn`, and may await other work in between. Raises the errors of `groups` and of `respond`."""

        async def one(session: Generation, home: Home, index: int, number: int) -> Rollout:
            try:
                return await respond(session, home, index, number)
            finally:
                session.close(home)

        async def work(session: Generation, put: Callable[[Group], None]) -> None:
            async def of_group(index: int, homes: Sequence[Home]) -> None:
                put((index, await gather([one(session, home, index, number) for number, home in enumerate(homes)])))
                self._cut.discard(prompts[index].position)

            order = longest_first(prompts) if self.longest_first else range(len(prompts))
            await gather([of_group(index, session.open(prompts[index].group_size(n))) for index in order])

        return self._stream(work, on_begun)

    def _stream(
        self,
        work: Callable[[Generation, Callable[[Group], None]], Coroutine[None, None, None]],
        on_begun: Callable[[], None],
    ) -> Stream[Group]:
        """Run `work(session, put)` in an event loop, in a task that `interrupt` cancels, and yield what it puts."""

        async def with_session(put: Callable[[Group], None]) -> None:
            task = asyncio.current_task()
            assert task is not None, "this coroutine runs in a task"
            self._under_way.add(task)
            try:
                if self._interrupted:  # check after registering in _under_way: else this races with `interrupt`
                    raise asyncio.CancelledError
                async with self.session(on_begun) as session:
                    await work(session, put)
            finally:
                self._under_way.discard(task)

        self.follow()
        try:
            yield from stream(with_session)
        except asyncio.CancelledError:
            raise EngineInterrupted("generation was interrupted") from None

    @contextlib.asynccontextmanager
    async def session(self, on_begun: Callable[[], None] = lambda: None) -> AsyncIterator[Generation]:
        """Open a Generation, which takes the turns of conversations one by one. Raises the errors of `groups`, also
        inside the block."""
        async with self._client() as connections:
            with ThreadPoolExecutor(READING_THREADS, "responses") as threads:
                slots = Slots(self.max_num_seqs, self.clients)
                tools = Tools(connections, threads, slots, self.copies, self.client)
                generation = Generation(self, tools, self._complete, on_begun)
                try:
                    async with generation.running():
                        yield generation
                except BaseExceptionGroup as errors:
                    raise first_error(errors) from None

    def interrupt(self) -> None:
        """Make every running and every later generation raise EngineInterrupted. Running ones close their connections,
        on which vLLM drops the requests. May be called from a signal handler."""
        self._interrupted = True
        for task in list(self._under_way):
            with contextlib.suppress(RuntimeError):  # the event loop has just ended in another thread
                task.get_loop().call_soon_threadsafe(task.cancel)

    def cut(self, positions: Collection[int]) -> None:
        """Truncate in-flight responses to the prompts at these `Prompt.position`s: each ends with its tokens so far."""
        self._cut |= set(positions)
        self._abort([name for name, (position, _) in dict(self._in_flight).items() if position in positions])

    def is_cut(self, prompt: Prompt) -> bool:
        """Whether responses in progress to the prompt are truncated."""
        return prompt.position in self._cut

    def leave_old_adapters(self) -> None:
        """Abort in-flight responses whose adapter is older than `in_flight` allows. They continue with the current one.
        Every client calls it after each push, before the next one removes their adapter from the servers."""
        if self.adapters and self.in_flight is not None:
            oldest = self.weight_version + 1 - (self.adapters if self.in_flight == "wait" else 1)
            self._abort([name for name, (_, version) in dict(self._in_flight).items() if version < oldest])

    def _abort(self, requests: Sequence[str]) -> None:
        """Abort the requests with these ids, on every server."""
        internal_ids = [f"generate-tokens-{request_id}" for request_id in requests]  # ids inside vLLM

        async def verbs(client: Connections, url: str) -> None:
            # a failing server's error surfaces where its responses are awaited
            with contextlib.suppress(WeightSyncError):
                body = {"request_ids": internal_ids}
                await self._request(client, url, "/inference/v1/abort_requests", body, HEALTH_SECONDS)

        if internal_ids:
            asyncio.run(self._each(verbs, self.fleet.serving()))

    # -- one response

    async def _complete(self, generation: Generation, url: str, request: Request) -> Rollout | None:
        """Return the rollout for a request, or None when it must be retried, on any server. A response that a weight
        update aborted is continued from its tokens, and so is one whose thought has used up its budget. One that `cut`
        aborted ends with its tokens, but gets at least one."""
        response = await self._ask(generation, url, request)
        resumes = self.in_flight == "resume" or (bool(self.adapters) and self.in_flight is not None)
        while response is not None and (response.is_aborted or request.has_thought(response)):
            cut = self.is_cut(request.group.prompt)
            if cut and response.token_ids.size:
                response = replace(response, finish_reason="length", cut=True)
                break
            if response.is_aborted and not (cut or resumes):
                break
            if request.has_thought(response):
                response = await self._after_thought(generation, request, response)
                if response.finish_reason == "stop":
                    break
            more = await self._ask(generation, url, request, response, limit=1 if cut else None)
            response = more and replace(joined(response, more), cut=cut)
        if response is None:
            return None
        rollout = partial(self._reader.rollout, url, request, response)
        return await generation.read(response.token_ids.size * BYTES_PER_TOKEN, rollout)

    async def _after_thought(self, generation: Generation, request: Request, response: Response) -> Response:
        """Return `request.after_thought` of the response, and pass tokens that it adds on to `on_tokens`."""
        size = response.token_ids.size
        end = partial(request.after_thought, response, self.decode)
        response = await generation.read(size * BYTES_PER_TOKEN, end)
        if request.on_tokens is not None and (added := response.token_ids[size:].tolist()):
            request.on_tokens(size, added)
        return response

    async def _ask(
        self,
        generation: Generation,
        url: str,
        request: Request,
        first: Response | None = None,
        limit: int | None = None,
    ) -> Response | None:
        """Send a request, which may continue an aborted response `first`, and return the response, which may be
        aborted; None when the request must be retried, here or elsewhere. Raises EngineError when no attempts are left
        or the server rejects the request."""
        version = self.weight_version
        try:
            answer = await self._post(generation, url, request, first, limit, version)
        except TimeoutError as error:
            self._hung(url, request, error)
            return None
        except ConnectionFailed as error:
            await self._failed(generation, url, request, str(error))
            return None
        if answer.status == 503 and self.in_flight is not None and await generation.shared(self._was_paused, url):
            return await self._ask(generation, url, request, first, limit)
        # a server that was restarted has the newest adapter only
        if answer.status >= 500 or (answer.status == 404 and self.adapters):
            await self._failed(generation, url, request, answer.error())
            return None
        if answer.status != 200:
            reason = answer.error()
            raise EngineError(f"{self.name(url)} rejected prompt {request.group.prompt.prompt_id}: {reason}")
        try:
            read = partial(self._reader.read, answer.content, request.max_tokens(first, limit))
            response = await generation.read(len(answer.content), read)
            return self._of_adapter(response, version) if self.adapters and self.in_flight is not None else response
        except InvalidResponse as error:
            await self._failed(generation, url, request, str(error), trusted=False)
            return None

    async def _post(
        self,
        generation: Generation,
        url: str,
        request: Request,
        first: Response | None,
        limit: int | None,
        version: int,
    ) -> Answer:
        """Send a request with a request id, by which `_abort` aborts it. With adapters it names that of `version`."""
        request_id = uuid.uuid4().hex
        # None for full weights, and before the first adapter is loaded: the request then names no model
        model = self.model or (adapter_name(version) if self.adapters and version else None)
        self._in_flight[request_id] = request.group.prompt.position, version
        try:
            post, on_line = generation.tools.connections.post, request.listener(first)

            async def upload() -> int:
                answer = await post(url, GENERATE, request.group.upload(f"{request_id}-images", model))
                return answer.status

            # a retry sends the pixels: the server may have dropped them
            by_name = self.keeps_images and bool(request.group.prompt.inputs) and not request.failures
            by_name = by_name and await self._uploads.has(url, request.group, upload)
            body = request.body(request_id, model, first, limit, pixels=not by_name)
            return await post(url, GENERATE, body, request.headers, on_line)
        finally:
            del self._in_flight[request_id]

    @staticmethod
    def _of_adapter(response: Response, version: int) -> Response:
        """Return the response with the version of its adapter, which the server does not report."""
        count = response.token_ids.size
        return replace(response, spans=(Span(str(version), 0, count),) if count else ())

    @property
    def _reader(self) -> Reader:
        return Reader(self, self.decode, self.any_version, self.routes, self.reads_no_versions)

    async def _was_paused(self, client: Connections, url: str) -> bool:
        """Whether the server rejected a request only because of a weight update. In that case wait until the server is
        no longer paused."""
        paused = False
        with contextlib.suppress(WeightSyncError):  # the next request will fail and report the cause
            while (await self._request(client, url, "/is_paused", seconds=HEALTH_SECONDS, method="GET"))["is_paused"]:
                paused = True
                await asyncio.sleep(LOOK_SECONDS)
        return paused

    async def _failed(
        self, generation: Generation, url: str, request: Request, reason: str, trusted: bool = True
    ) -> None:
        """Count a failed attempt at a response, so that it is retried after an exponential backoff or on another
        server.

        A server that fails its health check is SILENT. A server that is not `trusted`, or that fails a request
        repeatedly, is EXCLUDED. Raises EngineError when no attempts are left.
        """
        request.failures += 1
        self._uploads.forget(url)
        prompt_id = request.group.prompt.prompt_id
        if not await generation.shared(answers, url):
            self.fleet.silent(url)
        elif request.failures >= ATTEMPTS_PER_SERVER * (len(self.urls) if self.fleet.patience else 1):
            raise EngineError(
                f"{self.name(url)} failed, after {request.failures} attempts, on prompt {prompt_id}: {reason}"
            )
        elif self.fleet.patience and (not trusted or request.failures % ATTEMPTS_PER_SERVER == 0):
            self.fleet.excluded(url)
        else:
            await asyncio.sleep(LOOK_SECONDS * 2 ** (request.failures - 1))

    def _hung(self, url: str, request: Request, error: Exception) -> None:
        """Count a timed-out request; exclude its server, which may hang. Raises EngineError without attempts left."""
        if self.fleet.patience and not self.fleet.usable([url]):  # `Generation` has ended the request
            return
        request.failures += 1
        if not self.fleet.patience or request.failures >= ATTEMPTS_PER_SERVER:
            raise EngineError(
                f"{self.name(url)} did not respond within {self.request_timeout:.0f} s (rollout.request_timeout)"
            ) from error
        self.fleet.excluded(url)


def _seed_of_group(prompt: Prompt, n: int, seed: int) -> int:
    """Return the seed of a prompt's first response; response i has this plus i."""
    own = prompt.sampling.get("seed")
    return derive_seed(seed, prompt.prompt_id, prompt.occurrence) if own is None else own + n * prompt.occurrence
