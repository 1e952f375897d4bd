"""The client of one or several vLLM servers: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from collections.abc import Generator as Stream
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import httpx
import numpy as np

from megagrpo.engine.distribution import Choices, Generation, Job, gather, stream
from megagrpo.engine.http import HEALTH_SECONDS, answers, error_text
from megagrpo.engine.protocol import EngineError, EngineInterrupted, Generator, Group, derive_seed
from megagrpo.engine.responses import InvalidResponse, find_ending, is_broken_off, joined, read_choices, rest_of
from megagrpo.engine.tool_parsing import ToolCalls, read_tool_calls
from megagrpo.engine.updates import LOOK_SECONDS, Updates, adapter_name
from megagrpo.sync.wire.tensor_index import WeightSyncError
from megagrpo.types import Prompt, Rollout, SamplingParams

ATTEMPTS_PER_SERVER = 3  # failed attempts at a prompt before the error; per server if servers may return


@dataclass(eq=False, repr=False)
class VllmEngine(Updates, Generator):
    """Generates rollouts on vLLM servers that all hold the same weights.

    `decode` turns response ids into text. Each server works on up to `max_num_seqs` sequences; a free server takes the
    next prompt. When a server stops responding, its prompts go to other servers. It gets requests again once it has the
    current weights. `model` is the model name to request, such as an adapter that the servers started with. With
    `any_version` the weight versions of responses are not checked, because other clients may have updated the weights.
    All other options are those of `Updates`.

    `groups` is thread-safe. With `in_flight` it may also run during a weight update.
    """

    decode: Callable[[Sequence[int]], str]
    _: KW_ONLY
    max_num_seqs: int = 256
    model: str | None = None
    any_version: bool = False
    # the task of each generation, for `interrupt`
    _under_way: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    # request id of each request in flight -> `Prompt.place`
    _in_flight_places: dict[str, int | None] = field(default_factory=dict, init=False)
    # `Prompt.place` of the prompts whose responses are truncated
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
        """Generate `n` rollouts of each prompt; see `Generator.groups`. A prompt's seed depends on `seed`, its
        prompt_id and its occurrence.

        `on_begun` is called, perhaps repeatedly, when all prompts are on servers and one has room. It must not block.

        Raises EngineDeadError when no server is left, EngineStarved when all that remain need weights. Raises
        EngineInterrupted after `interrupt`, EngineError when a server rejects a request or responds inconsistently.
        """
        seeds = [derive_seed(seed, prompt.prompt_id, prompt.occurrence) for prompt in prompts]
        jobs = [self._job(index, prompt, n, sampling, seeds[index]) for index, prompt in enumerate(prompts)]
        return self._run(jobs, n, on_begun)

    def extend(
        self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Rollout]:
        """Generate one rollout per prompt, in order, each with its limits and seed. Raises the errors of `groups`."""
        requests = enumerate(zip(prompts, sampling, seeds, strict=True))
        jobs = [self._job(index, prompt, 1, params, seed) for index, (prompt, params, seed) in requests]
        return [rollout for _, (rollout,) in sorted(self._run(jobs, 1), key=itemgetter(0))]

    def read_tool_calls(self, turns: Sequence[Sequence[int]], tools: Sequence[dict[str, Any]]) -> list[ToolCalls]:
        """Return, for each turn, the text outside of the tool calls and the calls. The servers parse the turns with the
        tool parser they started with."""

        async def read() -> list[ToolCalls]:
            async with self._client() as client:
                return await read_tool_calls(client, self.serving(), turns, tools)

        return asyncio.run(read())

    def _run(self, jobs: list[Job], n: int, on_begun: Callable[[], None] = lambda: None) -> Stream[Group]:
        self.follow()
        try:
            yield from stream(partial(self._work_off, deque(jobs), n, on_begun))
        except asyncio.CancelledError:
            raise EngineInterrupted("generation was interrupted") from None

    def interrupt(self) -> None:
        """Make every running and every later generation raise EngineInterrupted. Running ones close their connections,
        on which vLLM drops the requests. May be called from a signal handler."""
        self._interrupted = True
        for task in list(self._under_way):
            with contextlib.suppress(RuntimeError):  # the event loop has just ended in another thread
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def _work_off(
        self, jobs: deque[Job], n: int, on_begun: Callable[[], None], put: Callable[[Group], None]
    ) -> None:
        """Put each finished group, in a task that `interrupt` cancels."""

        def deliver(url: str, job: Job, choices: Choices) -> None:
            put((job.index, [self._rollout(url, job, choice) for choice in choices]))
            self._cut.discard(job.prompt.place)

        task = asyncio.current_task()
        assert task is not None, "this coroutine runs in a task"
        self._under_way.add(task)
        try:
            if self._interrupted:  # check after registering in _under_way: the other order races with `interrupt`
                raise asyncio.CancelledError
            async with self._client() as client:
                slots = max(1, math.ceil(self.max_num_seqs / n))
                await Generation(self, client, jobs, slots, self._complete_choices, deliver, on_begun).run()
        finally:
            self._under_way.discard(task)

    async def _complete_choices(self, generation: Generation, url: str, job: Job) -> Choices | None:
        """Return the complete choices for one prompt, or None when it must be retried, on any server. A choice that a
        weight update aborted is continued from its tokens. One that `cut` aborted ends with its tokens."""
        choices = await self._ask(generation, url, job)
        while choices and any(map(is_broken_off, choices)):
            if self.in_flight != "resume" and job.prompt.place not in self._cut:
                break
            rests = await gather([self._rest(generation, url, job, choice) for choice in choices])
            complete = [rest for rest in rests if rest is not None]
            choices = complete if len(complete) == len(choices) else None
        return choices

    async def _rest(self, generation: Generation, url: str, job: Job, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return a choice together with its continuation if it was aborted, None when the continuation failed. A choice
        that was cut ends with the tokens it has, but gets at least one."""
        if not is_broken_off(choice):
            return choice
        if not (cut := job.prompt.place in self._cut):
            more = await self._ask(generation, url, replace(job, body=rest_of(job.body, choice)))
            return joined(choice, *more) if more else None
        if not choice["token_ids"]:
            more = await self._ask(generation, url, replace(job, body=rest_of(job.body, choice, limit=1)))
            return more[0] | {"index": choice["index"], "cut": cut} if more else None
        return choice | {"finish_reason": "length", "cut": cut}

    def cut(self, places: Collection[int]) -> None:
        """Truncate in-flight responses to the prompts with these `Prompt.place`s: each ends with its tokens so far."""
        self._cut |= set(places)
        place_of = dict(self._in_flight_places)
        # ids inside vLLM
        internal_ids = [f"generate-tokens-{request_id}" for request_id in place_of if place_of[request_id] in places]

        async def verbs(client: httpx.AsyncClient, url: str) -> None:
            # a failing server's error surfaces where its responses are awaited
            with contextlib.suppress(WeightSyncError):
                body = {"request_ids": internal_ids}
                await self._request(client, url, "/inference/v1/abort_requests", body, HEALTH_SECONDS)

        if internal_ids:
            asyncio.run(self._each(verbs, self.fleet.serving()))

    async def _ask(self, generation: Generation, url: str, job: Job) -> Choices | None:
        """Send the request for one prompt and return its choices, which may be aborted; None when the prompt must be
        retried, here or elsewhere. Raises EngineError when no attempts are left or the server rejects the prompt."""
        client = generation.client
        try:
            answer = await self._post_prompt(generation, url, job)
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as error:
            self._hung(url, job, error)
            return None
        except httpx.HTTPError as error:
            await self._failed(client, url, job, repr(error))
            return None
        if answer.status_code == 503 and self.in_flight is not None and await self._was_paused(client, url):
            return await self._ask(generation, url, job)
        if answer.status_code >= 500:
            await self._failed(client, url, job, error_text(answer))
            return None
        if answer.status_code != 200:
            raise EngineError(f"{self.name(url)} rejected prompt {job.prompt.prompt_id}: {error_text(answer)}")
        try:
            return self._read(answer, job)
        except InvalidResponse as error:
            await self._failed(client, url, job, str(error), trusted=False)
            return None

    async def _post_prompt(self, generation: Generation, url: str, job: Job) -> httpx.Response:
        """Send the request for one prompt under the deadline, with a request id by which `cut` aborts it."""
        request_id = uuid.uuid4().hex
        self._in_flight_places[request_id] = job.prompt.place
        try:
            async with generation.deadline(url):
                body = job.body | {"request_id": request_id}
                return await generation.client.post(f"{url}/inference/v1/generate", json=body)
        finally:
            del self._in_flight_places[request_id]

    def _read(self, answer: httpx.Response, job: Job) -> Choices:
        """Return a response's choices. Raises InvalidResponse if it is malformed, or stale while servers may return."""
        params = job.body["sampling_params"]
        choices = read_choices(answer, params["n"], params["max_tokens"])
        others = {version for choice in choices for version in self._other_versions(choice)}
        if self.fleet.patience and others:  # the server was restarted and does not have the current weights yet
            raise InvalidResponse(f"it sampled with weight version {sorted(others)}")
        return choices

    async def _was_paused(self, client: httpx.AsyncClient, url: str) -> bool:
        """Whether the server rejected a request only because of a weight update. In that case wait until the server is
        no longer paused."""
        paused = False
        with contextlib.suppress(WeightSyncError):  # the next request will fail and report the cause
            while (await self._request(client, url, "/is_paused", seconds=HEALTH_SECONDS, method="GET"))["is_paused"]:
                paused = True
                await asyncio.sleep(LOOK_SECONDS)
        return paused

    async def _failed(self, client: httpx.AsyncClient, url: str, job: Job, reason: str, trusted: bool = True) -> None:
        """Count a failed attempt of a prompt, so that it is retried after an exponential backoff or on another server.

        A server that fails its health check is SILENT. A server that is not `trusted`, or that fails a prompt
        repeatedly, is EXCLUDED. Raises EngineError when no attempts are left.
        """
        job.failures += 1
        if not await answers(client, url):
            self.fleet.silent(url)
        elif job.failures >= ATTEMPTS_PER_SERVER * (len(self.urls) if self.fleet.patience else 1):
            raise EngineError(
                f"{self.name(url)} failed, after {job.failures} attempts, on prompt {job.prompt.prompt_id}: {reason}"
            )
        elif self.fleet.patience and (not trusted or job.failures % ATTEMPTS_PER_SERVER == 0):
            self.fleet.excluded(url)
        else:
            await asyncio.sleep(LOOK_SECONDS * 2 ** (job.failures - 1))

    def _hung(self, url: str, job: Job, error: Exception) -> None:
        """Count a timed-out request; exclude its server, which may hang. Raises EngineError without attempts left."""
        if self.fleet.patience and not self.fleet.usable([url]):  # `Generation` has ended the request
            return
        job.failures += 1
        if not self.fleet.patience or job.failures >= ATTEMPTS_PER_SERVER:
            raise EngineError(
                f"{self.name(url)} did not respond within {self.request_timeout:.0f} s (rollout.request_timeout)"
            ) from error
        self.fleet.excluded(url)

    def _rollout(self, url: str, job: Job, choice: dict[str, Any]) -> Rollout:
        prompt, limit, reason = job.prompt, job.body["sampling_params"]["max_tokens"], choice["finish_reason"]
        count, text, stopped = find_ending(
            choice["token_ids"], self.decode, job.sampling.stop, job.sampling.include_stop
        )
        ids = tuple(choice["token_ids"][:count])
        logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"][:count])
        problem = ""
        if reason not in ("stop", "length"):
            problem = f"ended prompt {prompt.prompt_id} with finish_reason {reason!r}"
        elif reason == "length" and len(ids) < limit and not stopped and "cut" not in choice:
            problem = (
                f"has no room for prompt {prompt.prompt_id}: {len(prompt.token_ids)} tokens and a response of {limit}; "
                "start it with a larger --max-model-len"
            )
        elif not ids:
            problem = f"sent a response without tokens for prompt {prompt.prompt_id}"
        elif not all(math.isfinite(value) and value <= 1e-4 for value in logprobs):
            problem = f"sent invalid log-probs (NaN, inf or > 0) for prompt {prompt.prompt_id}: {logprobs}"
        elif count < len(choice["token_ids"]) and "joined" not in choice:
            problem = (
                f"went on after the stop string {stopped!r} (rollout.stop); start it without --skip-tokenizer-init"
            )
        if problem:
            raise EngineError(f"{self.name(url)} {problem}")
        version, *later = self._versions(url, job, choice)
        later = [part for part in later if part[0] < count]
        reason, stop_string = "stop" if stopped else reason, stopped if job.sampling.stop else None
        rows = np.array(ids, np.int32), np.array(logprobs, np.float32)
        return Rollout(prompt, *rows, reason, version[1], text, later_versions=tuple(later), stop_string=stop_string)

    def _versions(self, url: str, job: Job, choice: dict[str, Any]) -> list[tuple[int, int]]:
        """Return (first token, weight version) of each part of `choice`.

        Raises EngineError for another version than the last sync's, for example after a user restarted a server; with
        `in_flight` earlier versions are valid too. A server that reports no version is assumed to have kept the weights
        it had when the request was made.
        """
        if (others := self._other_versions(choice)) and not self.any_version:
            expected = self._reported_name(self.weight_version)
            raise EngineError(
                f"{self.name(url)} sampled with weight version {sorted(others)}; the last sync was {expected}"
            )
        spans = choice.get("weight_versions") or ()
        if self.in_flight is None or not spans:
            return [(0, self.weight_version if self.in_flight is None else job.version)]
        parts = [(span["start"], int(span["version"])) for span in spans]
        return [part for i, part in enumerate(parts) if i == 0 or part[1] != parts[i - 1][1]]

    def _other_versions(self, choice: dict[str, Any]) -> set[str]:
        """Return the weight versions that sampled part of `choice` and are invalid. With `in_flight`, the server may
        know the next version before this client does, so that one is valid."""
        others = {span["version"] for span in choice.get("weight_versions") or ()} - {
            self._reported_name(self.weight_version)
        }
        if self.in_flight is None:
            return others
        return {
            version for version in others if not (version.isdigit() and 1 <= int(version) <= self.weight_version + 1)
        }

    def _job(self, index: int, prompt: Prompt, n: int, sampling: SamplingParams, seed: int) -> Job:
        # None for full weights, and before the first adapter is loaded: the request then names no model
        model = self.model or (adapter_name(self.weight_version) if self.lora and self.weight_version else None)
        body = _request(prompt, n, sampling, seed) | ({} if model is None else {"model": model})
        return Job(index, prompt, body, self.weight_version, sampling)


def _request(prompt: Prompt, n: int, sampling: SamplingParams, seed: int) -> dict[str, Any]:
    params = {
        "n": n,
        "temperature": sampling.temperature,
        "top_p": sampling.truncation.top_p,
        "top_k": sampling.truncation.top_k,
        "min_p": sampling.truncation.min_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": seed,
        "logprobs": 0,  # only the log-prob of the sampled token
        "detokenize": False,
    }
    if sampling.stop:  # a server finds them in the text; `find_ending` also finds those that an interruption splits
        params |= {"stop": list(sampling.stop), "detokenize": True}
    return {"token_ids": list(prompt.token_ids), "sampling_params": params}
