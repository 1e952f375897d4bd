"""JSON over HTTP for rewards from other servers: retries with backoff, and errors that name the address."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_MOST_BYTES = 1 << 24  # of a response
_LONGEST_WAIT = 30.0  # upper limit on the seconds between two attempts, whatever Retry-After says


class ServiceError(RuntimeError):
    """A service gave no usable response; the message names its address, the last reason and the number of attempts."""


class JsonService:
    """A client that POSTs JSON to `url`.

    It retries up to `retries` times after a refused or dropped connection, a timeout of `timeout` seconds, or an
    overload status. It waits 0.5, 1, 2, ... seconds with jitter, or as the server's Retry-After says. Other error codes
    fail at once.
    """

    def __init__(self, url: str, timeout: float, retries: int, headers: dict[str, str] | None = None):
        self.url, self._timeout, self._retries = url, timeout, retries
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._client: httpx.AsyncClient | None = None

    async def post(self, body: dict[str, Any]) -> Any:
        """Return the JSON of the response. Raises ServiceError when all attempts fail."""
        import httpx  # imported late: a worker that only describes the function starts in half the time

        if self._client is None:  # created in the event loop that uses it
            self._client = httpx.AsyncClient(timeout=self._timeout, limits=httpx.Limits(max_connections=None))
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")  # a lone surrogate becomes "?"
        for attempt in range(self._retries + 1):
            wait, reason = 0.5 * 2**attempt * random.uniform(0.75, 1.25), ""
            try:
                async with asyncio.timeout(self._timeout):  # in all, however slowly the response drips
                    answer, text = await self._sent(self._client, content)
                if answer.status_code == 200:
                    return json.loads(text)
                reason = f"it responded with status {answer.status_code}: {text[:300].decode(errors='replace')}"
                if answer.status_code not in _AGAIN:
                    raise ServiceError(f"{self.url}: {reason}")
                wait = _asked_wait(answer, wait)
            except (httpx.TimeoutException, TimeoutError):
                reason = f"no answer within {self._timeout:g} s"
            except httpx.TransportError as error:
                reason = repr(error)
            except (ValueError, RecursionError) as error:
                reason = f"its response is not JSON: {error}"
            if attempt < self._retries:
                await asyncio.sleep(min(wait, _LONGEST_WAIT))
        raise ServiceError(f"{self.url}: {reason} ({self._retries + 1} attempts)")

    async def _sent(self, client: httpx.AsyncClient, content: bytes) -> tuple[httpx.Response, bytes]:
        """Send a request, and return the response and its body. Raises ServiceError for a body above the limit."""
        body = bytearray()
        async with client.stream("POST", self.url, content=content, headers=self._headers) as answer:
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > _MOST_BYTES:
                    raise ServiceError(f"{self.url}: its response has more than {_MOST_BYTES >> 20} MiB")
        return answer, bytes(body)


def _asked_wait(answer: httpx.Response, otherwise: float) -> float:
    try:
        return max(0.0, float(answer.headers["Retry-After"]))
    except (KeyError, ValueError):
        return otherwise
