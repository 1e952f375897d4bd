"""The client of one or several vLLM servers: token ids in, token ids and log-probs out, and the verbs of a weight update."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megagrpo.rollout.engine import EngineDeadError, EngineError, EngineInterrupted, OnGroup, WeightUpdate, derive_seed
from megagrpo.rollout.shared_weights import WeightSyncError
from megagrpo.rollout.tool_parsing import ToolCalls, read_tool_calls
from megagrpo.types import Prompt, Rollout, SamplingParams

ATTEMPTS = 3  # of one request on servers that answer their health check
INITIAL_VERSION = "default"  # what vLLM calls the weights it started with
CERTIFICATES = httpx.create_ssl_context(trust_env=False)  # every client would read them anew, which takes longer than a request


@dataclass
class _Job:
    """One prompt on its way: the request body, and how often it has failed."""

    place: int
    prompt: Prompt
    body: dict[str, Any]
    failures: int = 0


class VllmEngine:
    """Rollouts from vLLM servers that hold the same weights.

    `urls` are the servers, `logs` their log files for messages, `decode` turns response ids into text. Each server works on up to
    `max_num_seqs` sequences; a free one takes the next prompt. When a server stops answering, its prompts go to the others. With `lora`
    a weight version is an adapter, and the weights under it stay those that the servers started with. `model` asks for what the servers
    call so, such as an adapter that they started with; with `any_version` they may have been given weights by others.
    """

    def __init__(
        self,
        urls: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        *,
        max_num_seqs: int = 256,
        request_timeout: float = 1800.0,
        logs: Sequence[Path] = (),
        lora: bool = False,
        model: str | None = None,
        any_version: bool = False,
        sleeps: bool = False,
    ):
        if not urls:
            raise ValueError("rollout.urls: no vLLM server is named and none was started")
        self.urls, self.decode, self.max_num_seqs, self.timeout = list(urls), decode, max_num_seqs, request_timeout
        self.logs = dict(zip(urls, logs, strict=False))
        self.lora, self.model, self.any_version, self.sleeps = lora, model, any_version, sleeps
        self.asleep = False
        self.weight_version = 0
        self.dead: set[str] = set()
        self._interrupted = False
        self._under_way: tuple[asyncio.AbstractEventLoop, asyncio.Task] | None = None  # what `interrupt` ends

    def close(self) -> None:
        """Connections live no longer than one call: nothing to let go of."""

    # -- generation

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """`n` rollouts of each prompt, in order. Each prompt's seed follows from `seed`, its prompt_id and its occurrence.

        `on_group` gets the place and the rollouts of each prompt as they come.

        Raises EngineDeadError when no server is left, EngineInterrupted after `interrupt`, EngineError when a server refuses a request
        or its answer does not add up.
        """
        jobs: deque[_Job] = deque()
        for place, prompt in enumerate(prompts):
            own_seed = derive_seed(seed, prompt.prompt_id, prompt.occurrence)
            jobs.append(_Job(place, prompt, _request(prompt, n, sampling, own_seed) | self._model()))
        return self._run(jobs, n, on_group)

    def extend(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]) -> list[Rollout]:
        """One rollout of each prompt, with limits and a seed of its own, in order. Fails as `generate` does."""
        given = enumerate(zip(prompts, sampling, seeds, strict=True))
        jobs = deque(_Job(place, prompt, _request(prompt, 1, params, seed) | self._model()) for place, (prompt, params, seed) in given)
        return [rollout for (rollout,) in self._run(jobs, 1)]

    def read_tool_calls(self, turns: Sequence[Sequence[int]], tools: Sequence[dict[str, Any]]) -> list[ToolCalls]:
        """What stands outside of the tool calls in each turn, and the calls, by the parser that the servers were started with."""

        async def read() -> list[ToolCalls]:
            async with self._client() as client:
                return await read_tool_calls(client, self._alive(), turns, tools)

        return asyncio.run(read())

    def _run(self, jobs: deque[_Job], n: int, on_group: OnGroup | None = None) -> list[list[Rollout]]:
        groups: list[list[Rollout] | None] = [None] * len(jobs)
        try:
            asyncio.run(self._work_off(jobs, n, groups, on_group))
        except asyncio.CancelledError:
            raise EngineInterrupted("generation was interrupted") from None
        finally:
            self._under_way = None
        return groups

    def interrupt(self) -> None:
        """Have the `generate` that is under way close its connections, on which vLLM drops the requests, and raise EngineInterrupted;
        every later one raises it at once. May be called from a signal handler."""
        self._interrupted = True
        if self._under_way is not None:
            loop, task = self._under_way
            loop.call_soon_threadsafe(task.cancel)

    async def _work_off(self, jobs: deque[_Job], n: int, groups: list[list[Rollout] | None], on_group: OnGroup | None) -> None:
        self._under_way = asyncio.get_running_loop(), asyncio.current_task()
        if self._interrupted:  # looked at after the line above, so that no interrupt falls between the two
            raise asyncio.CancelledError
        left = len(jobs)

        async def serve(client: httpx.AsyncClient, url: str) -> None:
            nonlocal left
            while url not in self.dead and left:
                if not jobs:  # another server may still give its prompts back
                    await asyncio.sleep(0.02)
                    continue
                job = jobs.popleft()
                choices = await self._ask(client, url, job)
                if choices is None:
                    jobs.append(job)
                    continue
                groups[job.place] = [self._rollout(url, job, choice) for choice in _complete(url, choices, n)]
                if on_group is not None:
                    on_group(job.place, groups[job.place])
                left -= 1

        slots = max(1, math.ceil(self.max_num_seqs / n))
        async with self._client() as client:
            alive = self._alive()
            await _all([serve(client, url) for _ in range(min(slots, len(jobs))) for url in alive])  # servers take turns
        if left:
            self._alive()  # raises

    async def _ask(self, client: httpx.AsyncClient, url: str, job: _Job) -> list[dict[str, Any]] | None:
        """The choices for one prompt; None when it must be tried again, here or elsewhere."""
        try:
            answer = await client.post(f"{url}/inference/v1/generate", json=job.body)
        except httpx.TimeoutException as error:
            raise EngineError(f"{self._name(url)} did not answer within {self.timeout:.0f} s (rollout.request_timeout)") from error
        except httpx.TransportError as error:
            return await self._failed(client, url, job, repr(error))
        if answer.status_code >= 500:
            return await self._failed(client, url, job, _error_text(answer))
        if answer.status_code != 200:
            raise EngineError(f"{self._name(url)} refused prompt {job.prompt.prompt_id}: {_error_text(answer)}")
        return answer.json()["choices"]

    async def _failed(self, client: httpx.AsyncClient, url: str, job: _Job, reason: str) -> None:
        job.failures += 1
        if not await _answers(client, url):
            self.dead.add(url)
        elif job.failures >= ATTEMPTS:
            raise EngineError(f"{self._name(url)} failed {ATTEMPTS} times on prompt {job.prompt.prompt_id}: {reason}")

    def _rollout(self, url: str, job: _Job, choice: dict[str, Any]) -> Rollout:
        prompt, limit = job.prompt, job.body["sampling_params"]["max_tokens"]
        ids = tuple(choice["token_ids"])
        logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        told = [entry["token_id"] for entry in choice["logprobs"]["content"]]
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineError(f"{self._name(url)} ended prompt {prompt.prompt_id} for the reason {choice['finish_reason']!r}")
        if choice["finish_reason"] == "length" and len(ids) < limit:
            raise EngineError(
                f"{self._name(url)} has no room for prompt {prompt.prompt_id}: {len(prompt.token_ids)} tokens and a response of {limit}; "
                "start it with a larger --max-model-len"
            )
        if not ids or list(ids) != told:
            raise EngineError(f"{self._name(url)} sent {len(ids)} tokens and log-probs of {len(told)} others for prompt {prompt.prompt_id}")
        if not all(math.isfinite(value) and value <= 1e-4 for value in logprobs):
            raise EngineError(f"{self._name(url)} sent log-probs that are none for prompt {prompt.prompt_id}: {logprobs}")
        version = self._version(url, choice)
        return Rollout(prompt, ids, logprobs, choice["finish_reason"], version, self.decode(ids))

    def _version(self, url: str, choice: dict[str, Any]) -> int:
        """The weights that sampled `choice`; EngineError unless they are those of the last sync, e.g. after a server was restarted."""
        versions = {span["version"] for span in choice.get("weight_versions") or ()}
        expected = str(self.weight_version) if self.weight_version and not self.lora else INITIAL_VERSION
        if versions - {expected} and not self.any_version:
            raise EngineError(f"{self._name(url)} sampled with weight version {sorted(versions)}; the last sync was {expected}")
        return self.weight_version

    # -- weights

    def workers(self) -> dict[str, int]:
        """The address of each server that answers, and how many workers it has. WeightSyncError when one does not say."""
        return dict(zip(self._alive(), asyncio.run(self._each(self._world_size)), strict=True))

    async def _world_size(self, client: httpx.AsyncClient, url: str) -> int:
        return (await self._get(client, url, "/get_world_size"))["world_size"]

    def load_weights(self, update: WeightUpdate) -> list[dict[str, Any]]:
        """Have every worker of every server take in the weights of `update`; the engine is paused afterwards.

        Returns one report per worker, with `server` and `worker` added. WeightSyncError when a worker fails or does not report.
        """
        self._wake("weights")
        return [report for reports in asyncio.run(self._each(self._load_weights, update)) for report in reports]

    def sleep(self) -> None:
        """Have servers that can (`sleeps`) give their GPU memory back, until weights come again. Weights that adapters act on are kept in
        the host's memory."""

        async def verbs(client: httpx.AsyncClient, url: str) -> None:
            await self._post(client, url, f"/sleep?level={1 if self.lora else 2}")

        if self.sleeps and not self.asleep:
            asyncio.run(self._each(verbs))
            self.asleep = True

    def _wake(self, what: str) -> None:
        if self.asleep:
            asyncio.run(self._each(lambda client, url: self._post(client, url, f"/wake_up?tags={what}")))

    def resume(self, version: int) -> None:
        """Forget cached prefixes, which belong to older weights, and serve again."""

        async def verbs(client: httpx.AsyncClient, url: str) -> None:
            await self._post(client, url, "/reset_prefix_cache")
            await self._post(client, url, "/resume")

        self._wake("kv_cache")
        self.asleep = False
        asyncio.run(self._each(verbs))
        self.weight_version = version

    def load_adapter(self, folder: Path, version: int) -> list[dict[str, Any]]:
        """Have every server load the adapter in `folder` under the name of its version; what each of its workers then holds.

        WeightSyncError when a server refuses it.
        """

        async def verbs(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
            await self._forget_adapter(client, url, version)  # what an earlier attempt, or another run, has left
            # Not with load_inplace: vLLM would read the folder again for every request.
            await self._post(client, url, "/v1/load_lora_adapter", {"lora_name": adapter_name(version), "lora_path": str(folder)})
            workers = (await self._post(client, url, "/collective_rpc", {"method": "adapter_checksums"}))["results"]
            return [{"server": url, "worker": i, "sums": sums} for i, sums in enumerate(workers)]

        for what in ("weights", "kv_cache"):
            self._wake(what)
        self.asleep = False
        return [report for reports in asyncio.run(self._each(verbs)) for report in reports]

    def use_adapter(self, version: int) -> None:
        """Name the adapter of `version` in requests from here on; the servers forget the one before."""

        if self.weight_version not in (0, version):
            asyncio.run(self._each(self._forget_adapter, self.weight_version))
        self.weight_version = version

    async def _forget_adapter(self, client: httpx.AsyncClient, url: str, version: int) -> None:
        try:
            await self._post(client, url, "/v1/unload_lora_adapter", {"lora_name": adapter_name(version)})
        except WeightSyncError:  # it has none of that name
            pass

    def _model(self) -> dict[str, str]:
        """What a request says about whose weights it wants: nothing before the first adapter came."""
        if self.model is not None:
            return {"model": self.model}
        return {"model": adapter_name(self.weight_version)} if self.lora and self.weight_version else {}

    async def _load_weights(self, client: httpx.AsyncClient, url: str, update: WeightUpdate) -> list[dict]:
        version = update.manifest.version
        info = update.request(url)
        try:
            # Requests that are under way would go on with old keys and values, and vLLM must not run while parameters are aside.
            await self._post(client, url, "/pause?mode=wait")
            await self._start_update(client, url)
            await self._post(client, url, "/update_weights", {"update_info": info})
            await self._post(client, url, "/finish_weight_update", {"weight_version": str(version)})
            world = await self._world_size(client, url)
        except WeightSyncError as error:
            await self._give_up(client, url)
            raise WeightSyncError("; ".join(_worker_errors(update.replies(url))) or str(error)) from error
        reports = update.replies(url)
        if len(reports) != world:
            raise WeightSyncError(f"{self._name(url)}: {len(reports)} of {world} workers reported on weight version {version}")
        return [report | {"server": url} for report in reports]

    async def _start_update(self, client: httpx.AsyncClient, url: str) -> None:
        try:
            await self._post(client, url, "/start_weight_update")
        except WeightSyncError:  # an update whose end this client never saw may still be open
            await self._give_up(client, url)
            await self._post(client, url, "/start_weight_update")

    async def _give_up(self, client: httpx.AsyncClient, url: str) -> None:
        """Bring every worker out of an update that failed, so that the next one can start. Those that are out already say so: ignored."""
        try:
            await self._post(client, url, "/update_weights", {"update_info": {"abort": True}})
        except WeightSyncError:
            pass

    async def _post(self, client: httpx.AsyncClient, url: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._control(client.post(f"{url}{path}", json=body), url, path)

    async def _get(self, client: httpx.AsyncClient, url: str, path: str) -> Any:
        return await self._control(client.get(f"{url}{path}"), url, path)

    async def _control(self, request: Coroutine[Any, Any, httpx.Response], url: str, path: str) -> Any:
        try:
            answer = await request
        except httpx.TransportError as error:
            raise WeightSyncError(f"{self._name(url)} did not answer {path}: {error!r}") from error
        if answer.status_code != 200:
            raise WeightSyncError(f"{self._name(url)} answered {answer.status_code} to {path}: {_error_text(answer)}")
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None

    # -- servers

    async def _each(self, verb: Callable[..., Coroutine], *args: Any) -> list[Any]:
        """`verb` on every server at once. All of them come to an end before the first error is raised."""
        async with self._client() as client:
            results = await asyncio.gather(*(verb(client, url, *args) for url in self._alive()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _client(self) -> httpx.AsyncClient:
        # vLLM closes a connection after an error: a request that reuses it at that moment would be lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(timeout=httpx.Timeout(self.timeout, connect=10), limits=limits, trust_env=False, verify=CERTIFICATES)

    def _alive(self) -> list[str]:
        alive = [url for url in self.urls if url not in self.dead]
        if not alive:
            raise EngineDeadError("no vLLM server answers any more: " + ", ".join(map(self._name, self.urls)))
        return alive

    def _name(self, url: str) -> str:
        return f"vLLM server {url}" + (f" (log {self.logs[url]})" if url in self.logs else "")


def check_urls(urls: Sequence[str]) -> None:
    """ValueError that names the servers of `rollout.urls` that do not answer their health check."""

    async def check() -> list[bool]:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await asyncio.gather(*(_answers(client, url) for url in urls))

    if silent := [url for url, answers in zip(urls, asyncio.run(check()), strict=True) if not answers]:
        raise ValueError(f"rollout.urls: {', '.join(silent)} does not answer; start it, or leave rollout.urls empty to have one started")


def adapter_name(version: int) -> str:
    """What servers call the adapter of a weight version. vLLM keeps cached prefixes apart by this name."""
    return f"policy-{version}"


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
        "logprobs": 0,  # the sampled token's own and no others
        "detokenize": False,
    }
    return {"token_ids": list(prompt.token_ids), "sampling_params": params}


def _complete(url: str, choices: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    if len(choices) != n:
        raise EngineError(f"vLLM server {url} sent {len(choices)} responses; {n} were asked for")
    return sorted(choices, key=lambda choice: choice["index"])


async def _all(coroutines: Sequence[Coroutine]) -> list[Any]:
    """Results of all; when one fails, the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health", timeout=5)).status_code == 200
    except (httpx.TransportError, httpx.InvalidURL):
        return False


def _error_text(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500] or f"status {answer.status_code}"


def _worker_errors(reports: list[dict[str, Any]]) -> list[str]:
    return [f"worker {report['worker']}: {report['error']}" for report in reports if "error" in report]
