"""What a server answered to a prompt, taken for an answer only when it is one; how it goes on; and how long it may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import httpx

from megagrpo.engine.protocol import derive_seed


class Garbage(ValueError):
    """An answer that is none: another program's, half of one, or one that contradicts itself."""


def read_choices(answer: httpx.Response, n: int, max_tokens: int) -> list[dict[str, Any]]:
    """The `n` choices of an answer, by index. Garbage unless each has an index of its own, no more than `max_tokens` tokens, a log-prob of
    each of them, and a reason why it ended."""
    try:
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise Garbage(f"{len(choices)} responses came; {n} were asked for")
        for choice in choices:
            _check(choice, max_tokens)
    except Garbage:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        start = answer.text[:80].replace("\n", " ")
        raise Garbage(f"this is no answer to a prompt ({type(error).__name__}): {start!r}") from error
    return choices


def _check(choice: dict[str, Any], max_tokens: int) -> None:
    ids, content = choice["token_ids"], (choice["logprobs"] or {}).get("content") or ()
    if not all(type(token) is int and token >= 0 for token in ids) or not isinstance(choice["finish_reason"], str):
        raise Garbage(f"token ids or the reason of the end are none: {str(choice)[:80]}")
    if len(ids) > max_tokens:
        raise Garbage(f"{len(ids)} tokens came; {max_tokens} were asked for")
    if ids != [entry["token_id"] for entry in content] or not all(isinstance(entry["logprob"], int | float) for entry in content):
        raise Garbage(f"{len(ids)} tokens came with log-probs of {len(content)} others")


def is_broken_off(choice: dict[str, Any]) -> bool:
    """Whether an update of the weights has ended the choice before its time."""
    return choice["finish_reason"] == "abort"


def rest_of(body: dict[str, Any], choice: dict[str, Any], limit: int | None = None) -> dict[str, Any]:
    """The request that continues a choice which was broken off, by `limit` tokens: those that it has belong to the prompt then."""
    params, written = body["sampling_params"], choice["token_ids"]
    seed = derive_seed(params["seed"], choice["index"], len(written))
    left = {"n": 1, "max_tokens": limit or params["max_tokens"] - len(written), "seed": seed}
    return body | {"token_ids": body["token_ids"] + written, "sampling_params": params | left}


def joined(choice: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A choice that was broken off with the one that continues it."""
    written = len(choice["token_ids"])
    content = [entry for part in (choice, more) for entry in (part["logprobs"] or {}).get("content") or ()]
    later = [span | {key: span[key] + written for key in ("start", "end")} for span in more.get("weight_versions") or ()]
    return more | {
        "index": choice["index"],
        "token_ids": choice["token_ids"] + more["token_ids"],
        "logprobs": {"content": content},
        "weight_versions": [*(choice.get("weight_versions") or ()), *later],
    }


class Deadlines:
    """Ends requests that take longer than `seconds` in all, however slowly their answers drip, and all of a server when it is told to."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._under_way: dict[tuple[Any, str], set[asyncio.Timeout]] = defaultdict(set)  # of each event loop and server

    @contextlib.asynccontextmanager
    async def of(self, url: str) -> AsyncIterator[None]:
        """A request to the server at `url`; TimeoutError when it is ended."""
        async with asyncio.timeout(self.seconds) as limit:
            mine = self._under_way[asyncio.get_running_loop(), url]
            mine.add(limit)
            try:
                yield
            finally:
                mine.discard(limit)

    def end(self, url: str) -> None:
        """End those of this event loop that are under way at the server."""
        loop = asyncio.get_running_loop()
        for limit in [*self._under_way[loop, url]]:
            limit.reschedule(loop.time())

    def forget(self) -> None:
        """Let go of the event loop that runs, at its end."""
        loop = asyncio.get_running_loop()
        for key in [key for key in self._under_way if key[0] is loop]:
            del self._under_way[key]
