"""New weights and adapters for vLLM servers: the verbs of an update, each with a deadline, and what the workers say about it.

A server that dies on the way, or cannot be spoken to, is left out: it is none that could answer with other weights. One that lives and
cannot go on is an error that names server, phase, worker and tensor; it stays paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import httpx

from megagrpo.engine.http import HEALTH_SECONDS, MovedServers, NoAnswer, Servers, ServerTimeout, answers
from megagrpo.engine.protocol import ServerDied, WeightUpdate
from megagrpo.transfer.manifest import WeightSyncError

INITIAL_VERSION = "default"  # what vLLM calls the weights it started with
LOOK_SECONDS = 0.5  # between two looks at servers that do not answer
PAUSE_MODES = {None: "wait", "wait": "wait", "keep": "keep", "resume": "abort"}  # vLLM's names for what `in_flight` says


class Updates(Servers):
    """Servers that hold the same weights, `weight_version` of them.

    Each phase of an update ends within `sync_timeout` seconds. With `lora` a weight version is an adapter, and the weights under it stay
    those that the servers started with. `patience` is how many seconds a server that died may take to come back; 0: none does. Servers
    that can (`sleeps`) give their GPU memory back when they are told to. Without `refills` one that comes back waits for all ranks to give
    it weights. Where responses are generated while weights change, `in_flight` says what becomes of those under way: the update waits for
    them (wait), they stand still and go on (keep), or they are broken off and continued from their tokens (resume).
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        logs: Sequence[Path] = (),
        request_timeout: float = 1800.0,
        sync_timeout: float = 300.0,
        lora: bool = False,
        patience: float = 0.0,
        sleeps: bool = False,
        refills: bool = True,
        in_flight: str | None = None,
        token: str | None = None,
        urls_file: Path | None = None,
        moved: MovedServers | None = None,
    ):
        super().__init__(urls, logs=logs, request_timeout=request_timeout, token=token, urls_file=urls_file, moved=moved)
        self.sync_timeout, self.lora, self.patience = sync_timeout, lora, patience
        self.sleeps, self.asleep, self.refills, self.in_flight = sleeps, False, refills, in_flight
        self.unsettled: set[str] = set()  # servers that start or are silent: they may hold memory, and cannot be told to sleep
        self.leaving = False  # whether nobody waits for them any more
        self.weight_version = 0

    # -- weights

    def workers(self) -> dict[str, int]:
        """The address of each server that answers, and how many workers it has. Where none does, this waits for one to come back.
        WeightSyncError when one does not say, EngineDeadError when none is left."""

        async def verbs(client: httpx.AsyncClient, url: str) -> list[tuple[str, int]]:
            with _phase("publish"):
                return [(url, await self._world_size(client, url))]

        silent_since = time.monotonic()
        self.follow()
        while True:
            self._admit_waiting()
            if found := dict(self._update(verbs)):
                return found
            self.asleep = False  # one that is started again is awake, and has to find its memory free
            if time.monotonic() - silent_since >= self.patience:
                self._alive()  # raises
            time.sleep(LOOK_SECONDS)

    async def _world_size(self, client: httpx.AsyncClient, url: str) -> int:
        return (await self._get(client, url, "/get_world_size", self.sync_timeout))["world_size"]

    def sleep(self, keeps_weights: bool = False, last: bool = False) -> None:
        """Have servers that can give their GPU memory back, until weights come again, or until `wake` where they keep theirs in the host's
        memory. Those that adapters act on are always kept. One that starts, or is silent, is waited for, until it answers or has ended; if
        this is the `last` thing that servers do it is ended."""

        async def verbs(client: httpx.AsyncClient, url: str) -> list[Any]:
            await self._post(client, url, f"/sleep?level={1 if self.lora or keeps_weights else 2}", seconds=self.sync_timeout)
            return []

        if self.sleeps and not self.asleep:
            self.asleep, self.leaving = True, last  # none is started from here on
            while self.unsettled:
                time.sleep(LOOK_SECONDS)
            self.dead -= self.waiting  # they have no weights, but hold memory
            self._update(verbs)
            self.dead |= self.waiting

    def wake(self) -> None:
        """Have servers that sleep and have kept their weights go on with them."""
        for what in ("weights", "kv_cache"):
            self._wake(what, None)
        self.asleep = False

    def _wake(self, what: str, only: Sequence[str] | None) -> None:
        async def verbs(client: httpx.AsyncClient, url: str) -> list[Any]:
            await self._post(client, url, f"/wake_up?tags={what}", seconds=self.sync_timeout)
            return []

        if self.asleep and only is None:  # a server that has just started is awake
            self._update(verbs)

    def load_weights(self, update: WeightUpdate, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Have every worker of every server, or of those in `only`, take in the weights of `update`; they are paused afterwards.

        Returns one report per worker, with `server` and `worker` added; none of servers that died, and will come back. WeightSyncError
        when a worker fails, hangs or does not report; ServerDied when one died that `update` is for.
        """
        if only is None and update.servers is None:
            self._admit_waiting()
        self._wake("weights", only)
        return self._update(self._load_weights, update, only=only, together=update.servers)

    def resume(self, update: WeightUpdate, only: Sequence[str] | None = None) -> None:
        """Forget cached prefixes, which belong to older weights, and serve again; responses that were kept have theirs computed anew. Fails
        as `load_weights` does."""
        version, running = update.manifest.version, "?reset_running_requests=true" if self.in_flight == "keep" else ""

        async def verbs(client: httpx.AsyncClient, url: str) -> list[Any]:
            with _phase("resume"):
                # They have been verified. vLLM has the route from 0.27 on.
                name = {"new_version": str(version)}
                await self._post(client, url, "/update_weight_version", name, self.sync_timeout, optional=True)
                await self._post(client, url, f"/reset_prefix_cache{running}", seconds=self.sync_timeout)
                await self._post(client, url, "/resume", seconds=self.sync_timeout)
            return []

        self._wake("kv_cache", only)
        self.asleep = self.asleep and only is not None
        self._update(verbs, only=only, together=update.servers)
        self.weight_version = version

    async def _load_weights(self, client: httpx.AsyncClient, url: str, update: WeightUpdate) -> list[dict[str, Any]]:
        info = update.request(url)
        phase, seconds = "pause", self.sync_timeout
        try:
            # vLLM must not run while parameters are aside.
            await self._post(client, url, f"/pause?mode={PAUSE_MODES[self.in_flight]}", seconds=seconds)
            phase = "start"
            await self._end_update(client, url)  # one whose end this client never saw may still be open
            await self._post(client, url, "/start_weight_update", seconds=seconds)
            phase = "update"
            await self._post(client, url, "/update_weights", {"update_info": info}, seconds)
            _raise_worker_errors(update.replies(url), url)
            phase = "finish"
            await self._post(client, url, "/finish_weight_update", seconds=seconds)
            _raise_worker_errors(update.replies(url), url)
            world = await self._world_size(client, url)
            reports = update.replies(url)
            if len(reports) != world:
                errors = (await self._post(client, url, "/collective_rpc", {"method": "weight_update_error"}, seconds))["results"]
                told = f"{self._name(url)}: {len(reports)} of {world} workers reported on weight version {update.manifest.version}"
                raise WeightSyncError("; ".join([told, *(f"worker {i}: {error}" for i, error in enumerate(errors) if error)]))
        except ServerTimeout as error:
            raise ServerTimeout(f"phase {phase}: {error} (rollout.weight_sync_timeout){_standing(update, url)}") from error
        except WeightSyncError as error:
            with contextlib.suppress(WeightSyncError):
                await self._end_update(client, url)
            raise type(error)(f"phase {phase}: {error}") from error
        return [report | {"server": url} for report in reports]

    async def _end_update(self, client: httpx.AsyncClient, url: str) -> None:
        """Bring every worker out of an update that is open, if one is. vLLM's own verbs would raise where none is, and with several workers
        a verb that raises leaves answers behind that are taken for those of the next one."""
        await self._post(client, url, "/collective_rpc", {"method": "end_weight_update"}, self.sync_timeout)

    # -- adapters

    def load_adapter(self, folder: Path, version: int, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Have every server, or those in `only`, load the adapter in `folder` under the name of its version; what each of its workers then
        holds. WeightSyncError when a server refuses it."""

        async def verbs(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
            with _phase("update"):
                await self._forget_adapter(client, url, version)  # what an earlier attempt, or another run, has left
                # Not with load_inplace: vLLM would read the folder again for every request.
                body = {"lora_name": adapter_name(version), "lora_path": str(folder)}
                await self._post(client, url, "/v1/load_lora_adapter", body, self.sync_timeout)
                told = await self._post(client, url, "/collective_rpc", {"method": "adapter_checksums"}, self.sync_timeout)
            return [{"server": url, "worker": i, "sums": sums} for i, sums in enumerate(told["results"])]

        for what in ("weights", "kv_cache"):
            self._wake(what, only)
        self.asleep = self.asleep and only is not None
        return self._update(verbs, only=only)

    def use_adapter(self, version: int) -> None:
        """Name the adapter of `version` in requests from here on; the servers forget the one before."""

        async def verbs(client: httpx.AsyncClient, url: str) -> list[Any]:
            await self._forget_adapter(client, url, self.weight_version)
            return []

        if self.weight_version not in (0, version):
            self._update(verbs)
        self.weight_version = version

    async def _forget_adapter(self, client: httpx.AsyncClient, url: str, version: int) -> None:
        try:
            await self._post(client, url, "/v1/unload_lora_adapter", {"lora_name": adapter_name(version)}, self.sync_timeout)
        except ServerTimeout:
            raise
        except WeightSyncError:  # it has none of that name
            pass

    # -- servers that die and come back

    def _update(self, verbs: Any, *args: Any, only: Sequence[str] | None = None, together: Collection[str] | None = None) -> list[Any]:
        """What `verbs` gives on each server, in one list. A server that is gone afterwards counts as dead, and gives nothing, as does one
        that cannot be spoken to; it is an error where it is one of `only`, or was the last one and none comes back, and ServerDied where it
        is one of `together`."""
        failures: list[WeightSyncError] = []

        async def attempt(client: httpx.AsyncClient, url: str) -> list[Any]:
            try:
                return await verbs(client, url, *args)
            except WeightSyncError as error:
                if only is not None or (isinstance(error, ServerTimeout) and not self.patience):
                    raise
                if not await answers(client, url):
                    self.dead.add(url)
                elif isinstance(error, NoAnswer) and self.patience:
                    self.leave_out(url)
                else:
                    raise
                failures.append(error)
                return []

        if only is None and together is None and self.patience and not self._living():
            return []
        results = []
        try:
            results = [result for results in asyncio.run(self._each(attempt, only=only or together)) for result in results]
        except WeightSyncError as error:
            if together is None or not failures:
                raise
            failures.append(error)  # of one that the dead one has let down
        if failures and not self._living() and not self.patience:
            raise failures[0]
        if failures and together is not None:
            raise ServerDied("; ".join(map(str, failures)))
        return results

    def _admit_waiting(self) -> None:
        """Servers that came back and could not be given the weights of the last sync take part in this one."""
        self.dead -= self.waiting
        self.waiting.clear()

    async def _ready(self, client: httpx.AsyncClient, url: str) -> bool:
        """Whether the server serves, with the current weights."""
        if not await answers(client, url):
            return False
        try:
            if self.lora:
                models = await self._get(client, url, "/v1/models", HEALTH_SECONDS)
                return not self.weight_version or adapter_name(self.weight_version) in (model["id"] for model in models["data"])
            if (await self._get(client, url, "/is_paused", HEALTH_SECONDS))["is_paused"]:
                return False
            told = await client.get(f"{url}/weight_info", timeout=HEALTH_SECONDS)  # vLLM has it from 0.27 on
            return told.status_code == 404 or told.json()["weight_version"] == self._served_version()
        except (WeightSyncError, httpx.HTTPError, ValueError, LookupError, TypeError):  # other programs answer, too
            return False

    def _served_version(self) -> str:
        """What a server with the current weights calls them."""
        return str(self.weight_version) if self.weight_version and not self.lora else INITIAL_VERSION


class _phase:
    """Names the phase in a WeightSyncError from inside."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WeightSyncError):
            raise type(error)(f"phase {self.name}: {error}") from error


def adapter_name(version: int) -> str:
    """What servers call the adapter of a weight version. vLLM keeps cached prefixes apart by this name."""
    return f"policy-{version}"


def _raise_worker_errors(reports: list[dict[str, Any]], server: str) -> None:
    """WeightSyncError with what workers have reported, if any could not go on. They never raise, see `_end_update`."""
    if errors := [f"worker {report['worker']} of {server}: {report['error']}" for report in reports if "error" in report]:
        raise WeightSyncError("; ".join(errors))


def _standing(update: WeightUpdate, server: str) -> str:
    return "".join(f"; worker {worker} stands at {place}" for worker, place in update.standing(server).items())
