"""Updates of weights and adapters on vLLM servers: pause, load, verify, resume, each with a timeout.

A server that dies or stops responding during an update gets no requests until it has the new weights, so no response
comes from stale weights. A live server that fails the update is an error that names server, phase, worker and tensor;
that server stays paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from megagrpo.engine.http import HEALTH_SECONDS, NoAnswer, Servers, ServerTimeout, answers
from megagrpo.engine.protocol import ServerDied, WeightUpdate
from megagrpo.sync.wire.manifest import WeightSyncError

INITIAL_VERSION = "default"  # vLLM's name for the weights it started with
LOOK_SECONDS = 0.5  # between two polls of servers that do not respond
PAUSE_MODES = {None: "wait", "wait": "wait", "keep": "keep", "resume": "abort"}  # `in_flight` -> vLLM's pause mode


@dataclass(eq=False, repr=False)
class Updates(Servers):
    """Servers that hold the same weights, version `weight_version`.

    Each phase of an update times out after `sync_timeout` seconds. With `lora` a weight version is an adapter, and the
    base weights never change. With `sleeps` the servers can release their GPU memory. Without `refills` a server that
    returns must wait until all ranks push weights. All other options are those of `Servers`.

    `in_flight` is the treatment of in-flight responses during an update. "wait": the update waits for them. "keep":
    they are paused and continue afterwards. "resume": they are aborted and continued from their tokens. None: no
    response is in flight.
    """

    _: KW_ONLY
    sync_timeout: float = 300.0
    lora: bool = False
    sleeps: bool = False
    refills: bool = True
    in_flight: str | None = None
    _interrupted: bool = field(default=False, init=False)  # `interrupt` was called

    @property
    def weight_version(self) -> int:
        """The current weight version. Set it when another rank has synced the servers."""
        return self.fleet.version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.fleet.version = version

    # -- weights

    def workers(self) -> dict[str, int]:
        """Return the address of each server that gets updates and its number of workers. Without a server, wait up to
        the fleet's `patience` seconds for one.

        Raises WeightSyncError when a server does not report its workers, and when the run stops while it waits;
        EngineDeadError when no server is left.
        """

        async def verbs(client: httpx.AsyncClient, url: str) -> list[tuple[str, int]]:
            with _phase("publish"):
                return [(url, await self._world_size(client, url))]

        silent_since = time.monotonic()
        self.follow()
        while True:
            if num_workers := dict(self._update(verbs)):
                return num_workers
            self.fleet.end_sleep()  # a restarted server is awake, and needs the GPU memory to be free
            if self._interrupted:
                raise WeightSyncError("no vLLM server responds, and the run was asked to stop")
            if time.monotonic() - silent_since >= self.fleet.patience:
                self.serving()  # raises EngineDeadError
            time.sleep(LOOK_SECONDS)

    async def _world_size(self, client: httpx.AsyncClient, url: str) -> int:
        return int((await self._get(client, url, "/get_world_size", self.sync_timeout))["world_size"])

    def sleep(self, keeps_weights: bool = False, last: bool = False) -> None:
        """Make the servers release their GPU memory, if they can (`sleeps`).

        They sleep until the next weights arrive. With `keeps_weights` they move their weights to host memory and sleep
        until `wake`; base weights under adapters are always kept. Servers that wait for weights hold GPU memory too, so
        they also sleep. An unsettled server is waited for until it responds or exits. If this is the `last` call, the
        restart thread kills it.
        """

        async def verbs(client: httpx.AsyncClient, url: str) -> list[Any]:
            await self._post(
                client, url, f"/sleep?level={1 if self.lora or keeps_weights else 2}", seconds=self.sync_timeout
            )
            return []

        if self.sleeps and self.fleet.begin_sleep(last):
            while self.fleet.unsettled():
                time.sleep(LOOK_SECONDS)
            self._update(verbs)

    def wake(self) -> None:
        """Wake servers that sleep and kept their weights; they continue with these weights."""
        for what in ("weights", "kv_cache"):
            self._wake(what, None)
        self.fleet.end_sleep()

    def _wake(self, what: str, only: Sequence[str] | None) -> None:
        async def verbs(client: httpx.AsyncClient, url: str) -> list[Any]:
            await self._post(client, url, f"/wake_up?tags={what}", seconds=self.sync_timeout)
            return []

        if self.fleet.asleep and only is None:  # servers in `only` were just started, so they are awake
            self._update(verbs)

    def load_weights(self, update: WeightUpdate, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Load the weights of `update` on every worker of every server, or of the servers in `only`. The servers stay
        paused.

        Returns one report per worker, with `server` and `worker` added; servers that died and may return give no
        report. Raises WeightSyncError when a worker fails, hangs or does not report; ServerDied when a server died that
        must get `update`.
        """
        self._wake("weights", only)
        return self._update(self._load_weights, update, only=only, together=update.servers)

    def resume(self, update: WeightUpdate, only: Sequence[str] | None = None) -> None:
        """Drop cached prefixes, which were computed with older weights, and serve again. With `in_flight: keep` the KV
        cache of running responses is recomputed. A server that did not load the weights is left paused. Raises the
        errors of `load_weights`."""
        version, running = update.manifest.version, "?reset_running_requests=true" if self.in_flight == "keep" else ""

        async def verbs(client: httpx.AsyncClient, url: str) -> list[Any]:
            with _phase("resume"):
                # The trainer has verified the weights. vLLM has this route since 0.27.
                name = {"new_version": str(version)}
                await self._post(client, url, "/update_weight_version", name, self.sync_timeout, optional=True)
                await self._post(client, url, f"/reset_prefix_cache{running}", seconds=self.sync_timeout)
                await self._post(client, url, "/resume", seconds=self.sync_timeout)
            return []

        self._wake("kv_cache", only)
        if only is not None:
            self._update(verbs, only=only)
            return
        self.fleet.end_sleep()
        self._update(verbs, urls=self.fleet.holding(version), together=update.servers)
        self.fleet.synced(version)

    async def _load_weights(self, client: httpx.AsyncClient, url: str, update: WeightUpdate) -> list[dict[str, Any]]:
        info = update.request(url)
        phase, seconds = "pause", self.sync_timeout
        self.fleet.loading(url)
        try:
            # vLLM must not run while its parameters are moved aside.
            await self._post(client, url, f"/pause?mode={PAUSE_MODES[self.in_flight]}", seconds=seconds)
            phase = "start"
            await self._end_update(client, url)  # an update whose end this client never saw may still be open
            await self._post(client, url, "/start_weight_update", seconds=seconds)
            phase = "update"
            await self._post(client, url, "/update_weights", {"update_info": info}, seconds)
            _raise_worker_errors(await self._reports(client, url, update), url)
            phase = "finish"
            await self._post(client, url, "/finish_weight_update", seconds=seconds)
            reports = await self._reports(client, url, update)
            _raise_worker_errors(reports, url)
            world = await self._world_size(client, url)
            if len(reports) != world:
                errors = (await self._post(client, url, "/collective_rpc", {"method": "weight_update_error"}, seconds))[
                    "results"
                ]
                counted = (
                    f"{self.name(url)}: {len(reports)} of {world} workers reported on weight version "
                    f"{update.manifest.version}"
                )
                raise WeightSyncError(
                    "; ".join([counted, *(f"worker {i}: {error}" for i, error in enumerate(errors) if error)])
                )
        except ServerTimeout as error:
            raise ServerTimeout(
                f"phase {phase}: {error} (rollout.weight_sync_timeout){_stuck_in(update, url)}"
            ) from error
        except WeightSyncError as error:
            with contextlib.suppress(WeightSyncError):
                await self._end_update(client, url)
            raise type(error)(f"phase {phase}: {error}") from error
        self.fleet.loaded(url, update.manifest.version)
        return [report | {"server": url} for report in reports]

    async def _reports(self, client: httpx.AsyncClient, url: str, update: WeightUpdate) -> list[dict[str, Any]]:
        """Return the reports of the workers on `update` so far."""
        if not update.reports_by_http(url):
            return update.replies(url)
        answer = await self._post(client, url, "/collective_rpc", {"method": "weight_update_report"}, self.sync_timeout)
        return [json.loads(report) for report in answer["results"] if report]

    async def _end_update(self, client: httpx.AsyncClient, url: str) -> None:
        """End an update that is still open on any worker.

        vLLM's own routes raise when no update is open. With several workers, a call that raises leaves responses behind
        that the next call takes for its own.
        """
        await self._post(client, url, "/collective_rpc", {"method": "end_weight_update"}, self.sync_timeout)

    # -- adapters

    def load_adapter(self, folder: Path, version: int, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Load the adapter in `folder` on every server, or on those in `only`, under the name of its version. Returns
        the checksums of what each worker then holds. Raises WeightSyncError when a server rejects the adapter."""

        async def verbs(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
            self.fleet.loading(url)
            with _phase("update"):
                await self._forget_adapter(client, url, version)  # left over from an earlier attempt or another run
                # Without load_inplace: with it, vLLM would read the folder again for every request.
                body = {"lora_name": adapter_name(version), "lora_path": str(folder)}
                await self._post(client, url, "/v1/load_lora_adapter", body, self.sync_timeout)
                answer = await self._post(
                    client, url, "/collective_rpc", {"method": "adapter_checksums"}, self.sync_timeout
                )
            self.fleet.loaded(url, version)
            return [{"server": url, "worker": i, "sums": sums} for i, sums in enumerate(answer["results"])]

        for what in ("weights", "kv_cache"):
            self._wake(what, only)
        if only is None:
            self.fleet.end_sleep()
        return self._update(verbs, only=only)

    def use_adapter(self, version: int) -> None:
        """Request the adapter of `version` from here on, and unload the previous adapter."""

        async def verbs(client: httpx.AsyncClient, url: str) -> list[Any]:
            await self._forget_adapter(client, url, self.weight_version)
            return []

        if self.weight_version not in (0, version):
            self._update(verbs)
        self.fleet.synced(version)

    async def _forget_adapter(self, client: httpx.AsyncClient, url: str, version: int) -> None:
        try:
            await self._post(
                client, url, "/v1/unload_lora_adapter", {"lora_name": adapter_name(version)}, self.sync_timeout
            )
        except ServerTimeout:
            raise
        except WeightSyncError:  # the server has no adapter of that name
            pass

    # -- servers that die and come back

    def _update(
        self,
        verbs: Callable[..., Coroutine[Any, Any, list[Any]]],
        *args: Any,
        urls: Sequence[str] | None = None,
        only: Sequence[str] | None = None,
        together: Collection[str] | None = None,
    ) -> list[Any]:
        """Run `verbs` on each server that gets updates, or on those in `urls`, and return all results in one list.

        After a failed request, a server that fails its health check is SILENT. If servers may return, a server that
        passes it but did not respond to the request is EXCLUDED. Neither gives a result. Every other failure is raised,
        and also these two when no server is left and none may return.

        `only` and `together` replace `urls`. Every failure of a server in `only` is raised. The servers in `together`
        need each other for the update (`WeightUpdate.servers`): ServerDied is raised when one of them is SILENT or
        EXCLUDED.
        """
        failures: list[WeightSyncError] = []

        async def attempt(client: httpx.AsyncClient, url: str) -> list[Any]:
            try:
                return await verbs(client, url, *args)
            except WeightSyncError as error:
                if only is not None or (isinstance(error, ServerTimeout) and not self.fleet.patience):
                    raise
                if not await answers(client, url):
                    self.fleet.silent(url)
                elif isinstance(error, NoAnswer) and self.fleet.patience:
                    self.fleet.excluded(url)
                else:
                    raise
                failures.append(error)
                return []

        targets = only or together or (self.fleet.updatable() if urls is None else urls)
        if not targets and self.fleet.patience:
            return []
        if not targets:
            raise self.dead_error()
        results = []
        try:
            results = [result for results in asyncio.run(self._each(attempt, targets)) for result in results]
        except WeightSyncError as error:
            if together is None or not failures:
                raise
            failures.append(error)  # a server that waited for the dead one
        if failures and not self.fleet.updatable() and not self.fleet.patience:
            raise failures[0]
        if failures and together is not None:
            raise ServerDied("; ".join(map(str, failures)))
        return results

    async def report_if_ready(self, client: httpx.AsyncClient, url: str) -> None:
        """Report to the fleet when the server is healthy and serves the current weights."""
        version = self.weight_version
        if await self._serves(client, url, version):
            self.fleet.ready(url, version)

    async def _serves(self, client: httpx.AsyncClient, url: str, version: int) -> bool:
        """Whether the server is healthy and serves the weights of `version`."""
        if not await answers(client, url):
            return False
        try:
            if self.lora:
                models = await self._get(client, url, "/v1/models", HEALTH_SECONDS)
                return not version or adapter_name(version) in (model["id"] for model in models["data"])
            if (await self._get(client, url, "/is_paused", HEALTH_SECONDS))["is_paused"]:
                return False
            answer = await client.get(f"{url}/weight_info", timeout=HEALTH_SECONDS)  # vLLM has this route since 0.27
            return answer.status_code == 404 or answer.json()["weight_version"] == self._reported_name(version)
        except (
            WeightSyncError,
            httpx.HTTPError,
            ValueError,
            LookupError,
            TypeError,
        ):  # another program may respond at this address
            return False

    def _reported_name(self, version: int) -> str:
        """The name that a server with the weights of `version` reports for them."""
        return str(version) if version and not self.lora else INITIAL_VERSION


class _phase:
    """Prefixes a WeightSyncError raised inside with the name of the phase."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WeightSyncError):
            raise type(error)(f"phase {self.name}: {error}") from error


def adapter_name(version: int) -> str:
    """The servers' name for the adapter of a weight version. vLLM keeps cached prefixes of different names apart."""
    return f"policy-{version}"


def _raise_worker_errors(reports: list[dict[str, Any]], server: str) -> None:
    """Raise WeightSyncError if any worker reported an error. Workers report errors instead of raising them: see
    `_end_update`."""
    if errors := [
        f"worker {report['worker']} of {server}: {report['error']}" for report in reports if "error" in report
    ]:
        raise WeightSyncError("; ".join(errors))


def _stuck_in(update: WeightUpdate, server: str) -> str:
    return "".join(f"; worker {worker} is stuck in: {activity}" for worker, activity in update.activity(server).items())
