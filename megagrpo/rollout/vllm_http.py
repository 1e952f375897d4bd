"""vLLM servers seen from outside: their addresses, which of them answer, and requests that steer them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx

from megagrpo.rollout.access import headers
from megagrpo.rollout.engine import EngineDeadError
from megagrpo.rollout.shared_weights import WeightSyncError

CERTIFICATES = httpx.create_ssl_context(trust_env=False)  # every client would read them anew, which takes longer than a request
HEALTH_SECONDS = 5.0  # within which a server answers that it is well


class Servers:
    """`urls` are the servers, `logs` their log files for messages, `token` what they ask for. `dead` are those that no request goes to,
    `waiting` those of them that only need new weights."""

    def __init__(self, urls: Sequence[str], *, logs: Sequence[Path] = (), request_timeout: float = 1800.0, token: str | None = None):
        if not urls:
            raise ValueError("rollout.urls: no vLLM server is named and none was started")
        self.urls, self.timeout = list(urls), request_timeout
        self.logs = dict(zip(urls, logs, strict=False))
        self._headers = headers(token)
        self.dead: set[str] = set()
        self.waiting: set[str] = set()

    def close(self) -> None:
        """Connections live no longer than one call: nothing to let go of."""

    async def _post(
        self, client: httpx.AsyncClient, url: str, path: str, body: Any = None, seconds: float | None = None, optional: bool = False
    ) -> Any:
        """What the server answers; None from one that lacks an `optional` route. WeightSyncError when it does not, or with an error."""
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
        return await self._control(client.post(f"{url}{path}", json=body, timeout=timeout), url, path, seconds, optional)

    async def _get(self, client: httpx.AsyncClient, url: str, path: str, seconds: float | None = None) -> Any:
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else seconds
        return await self._control(client.get(f"{url}{path}", timeout=timeout), url, path, seconds)

    async def _control(
        self, request: Coroutine[Any, Any, httpx.Response], url: str, path: str, seconds: float | None, optional: bool = False
    ) -> Any:
        try:
            answer = await request
        except httpx.TimeoutException as error:
            raise ServerTimeout(f"{self._name(url)} did not answer {path} within {seconds or self.timeout:g} s") from error
        except httpx.TransportError as error:
            raise WeightSyncError(f"{self._name(url)} did not answer {path}: {error!r}") from error
        if answer.status_code == 404 and optional:
            return None
        if answer.status_code != 200:
            raise WeightSyncError(f"{self._name(url)} answered {answer.status_code} to {path}: {error_text(answer)}")
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None

    async def _each(self, verb: Callable[..., Coroutine], *args: Any, only: Collection[str] | None = None) -> list[Any]:
        """`verb` on every living server, or on those in `only`, at once. All of them come to an end before the first error is raised."""
        async with self._client() as client:
            urls = self._alive() if only is None else only
            results = await asyncio.gather(*(verb(client, url, *args) for url in urls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _client(self) -> httpx.AsyncClient:
        # vLLM closes a connection after an error: a request that reuses it at that moment would be lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        options = dict(limits=limits, trust_env=False, verify=CERTIFICATES, headers=self._headers)
        return httpx.AsyncClient(timeout=httpx.Timeout(self.timeout, connect=10), **options)

    def _living(self) -> list[str]:
        return [url for url in self.urls if url not in self.dead]

    def _alive(self) -> list[str]:
        if not (living := self._living()):
            raise EngineDeadError("no vLLM server answers any more: " + ", ".join(map(self._name, self.urls)))
        return living

    def _name(self, url: str) -> str:
        return f"vLLM server {url}" + (f" (log {self.logs[url]})" if url in self.logs else "")


class ServerTimeout(WeightSyncError):
    """A server that took a request did not answer it in time."""


def check_urls(urls: Sequence[str]) -> None:
    """ValueError that names the servers of `rollout.urls` that do not answer their health check."""

    async def check() -> list[bool]:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await asyncio.gather(*(answers(client, url) for url in urls))

    if silent := [url for url, answered in zip(urls, asyncio.run(check()), strict=True) if not answered]:
        raise ValueError(f"rollout.urls: {', '.join(silent)} does not answer; start it, or leave rollout.urls empty to have one started")


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the server at `url` says that it is well."""
    try:
        return (await client.get(f"{url}/health", timeout=HEALTH_SECONDS)).status_code == 200
    except (httpx.TransportError, httpx.InvalidURL):
        return False


def error_text(answer: httpx.Response) -> str:
    """The server's own words in an answer that is an error."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500] or f"status {answer.status_code}"
