"""vLLM's responses to prompts: validation, continuation of aborted ones, and the stop string that ends one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx

from megagrpo.engine.protocol import derive_seed


class InvalidResponse(ValueError):
    """A response is from another program, truncated, or inconsistent."""


def read_choices(answer: httpx.Response, n: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return the `n` choices of a response, sorted by index.

    Raises InvalidResponse unless the indices are 0 to n - 1 and each choice has a finish reason, at most `max_tokens`
    token ids, and a log-prob for each of them.
    """
    try:
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise InvalidResponse(f"got {len(choices)} responses; {n} were requested")
        for choice in choices:
            _check(choice, max_tokens)
    except InvalidResponse:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        start = answer.text[:80].replace("\n", " ")
        raise InvalidResponse(f"not a response to a prompt ({type(error).__name__}): {start!r}") from error
    return choices


def _check(choice: dict[str, Any], max_tokens: int) -> None:
    ids, content = choice["token_ids"], (choice["logprobs"] or {}).get("content") or ()
    if not all(type(token) is int and token >= 0 for token in ids) or not isinstance(choice["finish_reason"], str):
        raise InvalidResponse(f"invalid token_ids or finish_reason: {str(choice)[:80]}")
    if len(ids) > max_tokens:
        raise InvalidResponse(f"got {len(ids)} tokens; at most {max_tokens} were requested")
    if ids != [entry["token_id"] for entry in content] or not all(
        isinstance(entry["logprob"], int | float) for entry in content
    ):
        raise InvalidResponse(f"the {len(ids)} token ids do not match the {len(content)} log-prob entries")


def is_broken_off(choice: dict[str, Any]) -> bool:
    """Whether the choice was aborted, by a weight update or by `cut`, before it was complete."""
    return choice["finish_reason"] == "abort"


def rest_of(body: dict[str, Any], choice: dict[str, Any], limit: int | None = None) -> dict[str, Any]:
    """Build the request that continues an aborted choice by at most `limit` tokens. Earlier tokens join the prompt."""
    params, written = body["sampling_params"], choice["token_ids"]
    seed = derive_seed(params["seed"], choice["index"], len(written))
    left = {"n": 1, "max_tokens": limit or params["max_tokens"] - len(written), "seed": seed}
    return body | {"token_ids": body["token_ids"] + written, "sampling_params": params | left}


def joined(choice: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Join an aborted choice with its continuation; weight version spans shift to positions in the joined one."""
    written = len(choice["token_ids"])
    content = [entry for part in (choice, more) for entry in (part["logprobs"] or {}).get("content") or ()]
    later = [
        span | {key: span[key] + written for key in ("start", "end")} for span in more.get("weight_versions") or ()
    ]
    return more | {
        "index": choice["index"],
        "joined": True,
        "token_ids": choice["token_ids"] + more["token_ids"],
        "logprobs": {"content": content},
        "weight_versions": [*(choice.get("weight_versions") or ()), *later],
    }


class Ending(NamedTuple):
    """Where a response ends: its number of tokens, its text, and the stop string that ended it ("" if none did)."""

    num_tokens: int
    text: str
    stop_string: str


def find_ending(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], stop: Sequence[str], include_stop: bool
) -> Ending:
    """Return where the first complete stop string ends the response.

    The last token is the one that completes the stop string; it may have more characters, which the text leaves out.
    The text ends after the stop string with `include_stop`, else before it. If two strings are complete at the same
    character, the first of `stop` counts, as in vLLM.
    """
    text = decode(token_ids)
    if (match := _first_match(text, stop)) is None:
        return Ending(len(token_ids), text, "")
    end, start, string = match
    count = len(token_ids)
    if _first_match(decode(token_ids[:-1]), stop) is not None:
        count = bisect_left(range(count), True, key=lambda n: _first_match(decode(token_ids[:n]), stop) is not None)
    return Ending(count, text[: end if include_stop else start], string)


def _first_match(text: str, stop: Sequence[str]) -> tuple[int, int, str] | None:
    """Return (end, start, stop string) of the match that is complete first."""
    starts = [(text.find(string), string) for string in stop]
    return min(
        ((start + len(string), start, string) for start, string in starts if start >= 0),
        key=lambda match: match[0],
        default=None,
    )
