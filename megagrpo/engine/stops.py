"""Finds the stop string that ends a response, in its text and in its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple


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
