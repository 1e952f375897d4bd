"""Updates of weights and adapters on vLLM servers: pause, load, verify, resume, each with a timeout.

A server that dies or hangs during an update gets no requests until it has the new weights, so no response is stale. A
live server that fails the update is an error naming server, phase, worker and tensor; it stays paused.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megagrpo.engine.http.connections import HEALTH_SECONDS, Connections, answers
from megagrpo.engine.http.protocol import ServerDied, WeightUpdate
from megagrpo.engine.http.server_calls import NoAnswer, Servers, ServerTimeout
from megagrpo.platform.process.cleanup.ownership import SHARED_MEMORY
from megagrpo.types import WeightSyncError

ADAPTER_PART = 1 << 25  # bytes of an adapter's file in one message to a server on another host
INITIAL_VERSION = "default"  # vLLM's name for the weights it started with
LOOK_SECONDS = 0.5  # between two polls of servers that do not respond
PAUSE_MODES = {None: "wait", "wait": "wait", "keep": "keep", "resume": "abort"}  # `in_flight` -> vLLM's pause mode


@dataclass(eq=False, repr=False)
class Updates(Servers):
    """Servers that hold the same weights, version `weight_version`.

    Each phase of an update times out after `sync_timeout` seconds. With `adapters` a weight version is an adapter, the
    base weights never change, and a server serves as many versions at once. With `sleeps` the servers can release their
    GPU memory. Without `refills` a server that returns must wait until all ranks push weights. All other options are
    those of `Servers`.

    `towers` are those of a multimodal model that gets images. "trained": updates fill them. "frozen": they stay as
    loaded, so that servers that sleep keep all weights in host memory. None: no request has images.

    `in_flight` is the treatment of in-flight responses in an update. "wait": it waits for them. "keep": they pause and
    continue afterwards. "resume": they are aborted and continued from their tokens. None: none is in flight.
    """

    _: KW_ONLY
    sync_timeout: float = 300.0
    adapters: int = 0
    sleeps: bool = False
    towers: Literal["frozen", "trained"] | None = None
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

        async def verbs(client: Connections, url: str) -> list[tuple[str, int]]:
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

    async def _world_size(self, client: Connections, url: str) -> int:
        return int((await self._call(client, url, "/get_world_size", method="GET"))["world_size"])

    def sleep(self, keeps_weights: bool = False, last: bool = False) -> None:
        """Make the servers release their GPU memory, if they can (`sleeps`).

        They sleep until the next weights. With `keeps_weights` they move weights to host memory and sleep until `wake`.
        With adapters or frozen towers weights are always kept. Servers that await weights sleep too: they hold GPU
        memory. Unsettled servers are awaited until they respond or exit; in the `last` call the restart thread kills
        them.
        """

        async def verbs(client: Connections, url: str) -> None:
            keeps = self.adapters or keeps_weights or self.towers == "frozen"
            await self._call(client, url, f"/sleep?level={1 if keeps else 2}")

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
        async def verbs(client: Connections, url: str) -> None:
            await self._call(client, url, f"/wake_up?tags={what}")

        if self.fleet.asleep and only is None:  # servers in `only` were just started, so they are awake
            self._update(verbs)

    def load_weights(self, update: WeightUpdate, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Load `update`'s weights on every worker of every server, or of those in `only`. The servers stay paused.

        Returns one report per worker, with `server` and `worker` added; servers that died and may return give no
        report. Raises WeightSyncError when a worker fails, hangs or does not report; ServerDied when a server died that
        must get `update`.
        """
        self._wake("weights", only)
        return self._update(self._load_weights, update, only=only, together=update.servers)

    def resume(self, update: WeightUpdate, only: Sequence[str] | None = None) -> None:
        """Drop cached prefixes of older weights and serve again. With `in_flight: keep` the KV cache of running
        responses is recomputed. A server without the weights stays paused. Raises the errors of `load_weights`."""
        version, running = update.index.version, "?reset_running_requests=true" if self.in_flight == "keep" else ""

        async def verbs(client: Connections, url: str) -> None:
            with _phase("resume"):
                # The trainer has verified the weights. vLLM has this route since 0.27. Adapters have their own names.
                if not self.adapters:
                    name = {"new_version": str(version)}
                    await self._call(client, url, "/update_weight_version", name, optional=True)
                await self._call(client, url, f"/reset_prefix_cache{running}")
                if self.towers == "trained":  # vLLM keeps a tower's outputs by the hash of the image
                    await self._call(client, url, "/reset_encoder_cache")
                await self._call(client, url, "/resume")

        self._wake("kv_cache", only)
        if only is not None:
            self._update(verbs, only=only)
            return
        self.fleet.end_sleep()
        self._update(verbs, urls=self.fleet.holding(version), together=update.servers)
        self.fleet.synced(version)

    async def _load_weights(self, client: Connections, url: str, update: WeightUpdate) -> list[dict[str, Any]]:
        version = update.index.version
        info = {"version": version, "receiver": update.receiver, "request": update.request(url)}
        self.fleet.loading(url)
        try:
            with _phase("pause"):  # vLLM must not run while its parameters are moved aside
                await self._call(client, url, f"/pause?mode={PAUSE_MODES[self.in_flight]}")
            with _phase("start"):
                await self._end_update(client, url)  # an update whose end this client never saw may still be open
                if self.towers == "trained":
                    await self._rpc(client, url, "fill_towers")
                await self._call(client, url, "/start_weight_update")
            with _phase("update"):
                await self._call(client, url, "/update_weights", {"update_info": info})
                await self._reports(client, url, update.reports(url))
            with _phase("finish"):
                await self._call(client, url, "/finish_weight_update")
                reports = await self._reports(client, url, update.reports(url))
                world = await self._world_size(client, url)
                if len(reports) != world:
                    await self._reports(client, url, None)  # raises the errors of workers that could not report
                    counted = (
                        f"{self.name(url)}: {len(reports)} of {world} workers reported on weight version {version}"
                    )
                    raise WeightSyncError(counted)
        except ServerTimeout as error:
            stuck_in = "".join(
                f"; worker {report['worker']} is stuck in: {report['activity']}"
                for report in update.reports(url) or ()
                if "activity" in report
            )
            raise ServerTimeout(f"{error} (rollout.weight_sync_timeout){stuck_in}") from error
        except WeightSyncError:
            with contextlib.suppress(WeightSyncError):
                await self._end_update(client, url)
            raise
        self.fleet.loaded(url, version)
        return [report | {"server": url} for report in reports]

    async def _reports(self, client: Connections, url: str, known: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Return the workers' reports: `known`, or those that the server gives. Raises WeightSyncError if any worker
        reports an error; workers report errors instead of raising them, see `_end_update`."""
        if known is None:
            known = [json.loads(report) for report in await self._rpc(client, url, "weight_update_report") if report]
        reports = [report for report in known if "activity" not in report]
        if errors := [f"worker {one['worker']} of {url}: {one['error']}" for one in reports if "error" in one]:
            raise WeightSyncError("; ".join(errors))
        return reports

    async def _end_update(self, client: Connections, url: str) -> None:
        """End an update that is still open on any worker.

        vLLM's own routes raise when no update is open. With several workers, a call that raises leaves responses behind
        that the next call takes for its own.
        """
        await self._rpc(client, url, "end_weight_update")

    async def _rpc(self, client: Connections, url: str, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerVerbs` on every worker, and return the results, of the first data-parallel copy."""
        body = {"method": method, "args": args}
        results: list[Any] = (await self._call(client, url, "/collective_rpc", body))["results"]
        return results

    async def _call(self, client: Connections, url: str, path: str, body: Any = None, **options: Any) -> Any:
        return await self._request(client, url, path, body, self.sync_timeout, **options)

    # -- adapters

    def load_adapter(
        self,
        folder: Path,
        version: int,
        sums: dict[str, list[str]],
        here: Callable[[str], bool],
        only: Sequence[str] | None = None,
    ) -> int:
        """Load the adapter in `folder` on every server, or on those in `only`, under the name of its version. Returns
        the number of workers. Raises WeightSyncError when a server rejects it, or a worker's differs from `sums`
        (`WorkerVerbs.adapter_problem`). Servers that are not `here` get the files first."""

        async def verbs(client: Connections, url: str) -> list[int]:
            self.fleet.loading(url)
            with _phase("update"):
                path = folder if here(url) else await self._send_adapter(client, url, folder, version)
                await self._forget_adapter(client, url, version)  # left over from an earlier attempt or another run
                # Without load_inplace: with it, vLLM would read the folder again for every request.
                body = {"lora_name": adapter_name(version), "lora_path": str(path)}
                await self._call(client, url, "/v1/load_lora_adapter", body)
                self._check(url, await self._rpc(client, url, "adapter_problem", sums))
                workers = await self._world_size(client, url)
            self.fleet.loaded(url, version)
            return [workers]

        for what in ("weights", "kv_cache"):
            self._wake(what, only)
        if only is None:
            self.fleet.end_sleep()
        return sum(self._update(verbs, only=only))

    async def _send_adapter(self, client: Connections, url: str, folder: Path, version: int) -> Path:
        """Send the files of `folder` to a server on another host, whose workers store them. Returns their folder."""
        unused = [f"adapter{self.oldest_adapter(version) - 2}"]  # the previous version serves until this one is loaded
        for path in sorted(folder.iterdir()):
            size = path.stat().st_size
            with path.open("rb") as file:
                for end in range(ADAPTER_PART, size + ADAPTER_PART, ADAPTER_PART):
                    data = base64.b64encode(await asyncio.to_thread(file.read, ADAPTER_PART)).decode()
                    part = (folder.parent.name, folder.name, unused, path.name, data, end >= size)
                    self._check(url, await self._rpc(client, url, "store_adapter", *part))
        return SHARED_MEMORY / folder.parent.name / folder.name

    def _check(self, url: str, problems: Sequence[str]) -> None:
        """Raise WeightSyncError for the first problem of a worker of the server, if any."""
        for worker, problem in enumerate(problems):
            if problem:
                raise WeightSyncError(f"{self.name(url)}, worker {worker}: {problem}")

    def use_adapter(self, version: int) -> None:
        """Request the adapter of `version` from here on, and unload the one before `oldest_adapter`."""
        unused = self.oldest_adapter(version) - 1

        async def verbs(client: Connections, url: str) -> None:
            await self._forget_adapter(client, url, unused)

        if unused > 0:
            self._update(verbs)
        self.fleet.synced(version)

    def oldest_adapter(self, version: int) -> int:
        """The oldest version whose adapter stays when `version` becomes current. One more than `adapters` stays while
        responses are in flight: clients abort the last responses of that one after the push."""
        return version + 1 - self.adapters - (self.in_flight is not None)

    async def _forget_adapter(self, client: Connections, url: str, version: int) -> None:
        try:
            await self._call(client, url, "/v1/unload_lora_adapter", {"lora_name": adapter_name(version)})
        except ServerTimeout:
            raise
        except WeightSyncError:  # the server has no adapter of that name
            pass

    # -- servers that die and come back

    def _update(
        self,
        verbs: Callable[..., Coroutine[Any, Any, list[Any] | None]],
        *args: Any,
        urls: Sequence[str] | None = None,
        only: Sequence[str] | None = None,
        together: Collection[str] | None = None,
    ) -> list[Any]:
        """Run `verbs` on each server that gets updates, or on those in `urls`, and return their results in one list.

        After a failed request, a server that fails its health check is SILENT. If servers may return, a server that
        passes it but did not respond to the request is EXCLUDED. Neither gives a result. Every other failure is raised,
        and also these two when no server is left and none may return.

        `only` and `together` replace `urls`. Any failure of a server in `only` is raised. Servers in `together` need
        each other for the update (`WeightUpdate.servers`): ServerDied is raised when one is SILENT or EXCLUDED.
        """
        failures: list[WeightSyncError] = []

        async def attempt(client: Connections, url: str) -> list[Any]:
            try:
                return await verbs(client, url, *args) or []
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
        results: list[Any] = []
        try:
            for of_server in asyncio.run(self._each(attempt, targets)):
                results += of_server
        except WeightSyncError as error:
            if together is None or not failures:
                raise
            failures.append(error)  # a server that waited for the dead one
        if failures and not self.fleet.updatable() and not self.fleet.patience:
            raise failures[0]
        if failures and together is not None:
            raise ServerDied("; ".join(map(str, failures)))
        return results

    async def report_if_ready(self, client: Connections, url: str) -> None:
        """Report to the fleet when the server is healthy and serves the current weights."""
        version = self.weight_version
        if await self._serves(client, url, version):
            self.fleet.ready(url, version)

    async def _serves(self, client: Connections, url: str, version: int) -> bool:
        """Whether the server is healthy and serves the weights of `version`."""
        if not await answers(client, url):
            return False
        try:
            if self.adapters:
                models = await self._request(client, url, "/v1/models", seconds=HEALTH_SECONDS, method="GET")
                return not version or adapter_name(version) in (model["id"] for model in models["data"])
            if (await self._request(client, url, "/is_paused", seconds=HEALTH_SECONDS, method="GET"))["is_paused"]:
                return False
            # vLLM has this route since 0.27
            info = await self._request(client, url, "/weight_info", seconds=HEALTH_SECONDS, method="GET", optional=True)
            return info is None or info["weight_version"] == self.reported_name(version)
        # another program may respond at this address
        except (WeightSyncError, LookupError, TypeError):
            return False

    def reported_name(self, version: int) -> str:
        """The name that a server with the weights of `version` reports for them."""
        return str(version) if version and not self.adapters else INITIAL_VERSION


@contextlib.contextmanager
def _phase(name: str) -> Iterator[None]:
    """Prefix a WeightSyncError raised inside with the name of the phase."""
    try:
        yield
    except WeightSyncError as error:
        raise type(error)(f"phase {name}: {error}") from error


def adapter_name(version: int) -> str:
    """The servers' name for the adapter of a weight version. vLLM keeps cached prefixes of different names apart."""
    return f"policy-{version}"
