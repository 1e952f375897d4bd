"""vLLM's responses as arrays: validation, continuation of aborted ones, and the stop string that ends one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from megagrpo.data.packing.routed_experts import joined_routes, read_routes


class _Entry(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class Span(msgspec.Struct, gc=False):
    """The tokens [start, end) of a response, which the weights `version` sampled."""

    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int
    token_ids: msgspec.Raw
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[Span] | None = None
    routed_experts: bytes | None = None  # a .npy file in base64, which msgspec decodes


class _Body(msgspec.Struct):
    choices: list[_Choice]


class _Part(msgspec.Struct):
    """A choice of an event of a stream: new tokens, and in the last one how the response ended."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[Span] | None = None
    routed_experts: bytes | None = None


class _Event(msgspec.Struct):
    choices: list[_Part]


class _NewTokens(msgspec.Struct):
    token_ids: list[int]


class _Heard(msgspec.Struct):
    choices: list[_NewTokens] = []
    error: msgspec.Raw = msgspec.Raw()


# Strict: a bool is no integer, NaN is no JSON, and the body must be complete. All other fields are skipped.
_BODY, _IDS = msgspec.json.Decoder(_Body), msgspec.json.Decoder(list[int])
_EVENT, _HEARD = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_Heard)
_DATA, _END = b"data: ", b"data: [DONE]"  # of events; the last one


class InvalidResponse(ValueError):
    """A response is from another program, truncated, or inconsistent."""


@dataclass(frozen=True, eq=False)
class Response:
    """One response of a server, or several parts of it joined."""

    token_ids: np.ndarray  # [Lr] int32
    logprobs: np.ndarray  # [Lr] float32
    finish_reason: str
    spans: tuple[Span, ...] = ()  # empty: the server reports no weight versions
    joined: bool = False  # it has several parts
    cut: bool = False  # `cut` ended it
    # [start, stop) of the tokens that ended its thought, empty if it was over; None: its budget is not used up
    forced: tuple[int, int] | None = None
    routes: np.ndarray | None = None  # [n, layers, k], of the tokens that the server read; None: it sent none

    @property
    def is_aborted(self) -> bool:
        """Whether it was aborted, by a weight update or by `cut`, before it was complete."""
        return self.finish_reason == "abort"


def read_response(content: bytes, max_tokens: int) -> Response:
    """Return the response in the body `content`, which may be a stream of events.

    Raises InvalidResponse unless it has one choice, with index 0, a finish reason, at most `max_tokens` token ids, and
    a log-prob for each of them.
    """
    try:
        choices = _of_stream(content) if content.startswith(_DATA) else _BODY.decode(content).choices
        if [choice.index for choice in choices] != [0]:
            raise InvalidResponse(f"got {len(choices)} responses; 1 was requested")
        return _response(choices[0], max_tokens)
    except InvalidResponse:
        raise
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        start = content[:80].decode(errors="replace").replace("\n", " ")
        raise InvalidResponse(f"not a response to a prompt ({error}): {start!r}") from error


def _of_stream(content: bytes) -> list[_Choice]:
    """Return the choice that the events of a stream add up to."""
    lines = [line for line in content.split(b"\n") if line]
    if lines[-1] != _END:
        raise InvalidResponse("the stream has no end")
    parts = [part for line in lines[:-1] for part in _EVENT.decode(line.removeprefix(_DATA)).choices]
    if not parts or parts[-1].finish_reason is None or any(part.index for part in parts):
        raise InvalidResponse("the stream ended before its response did")
    ids = [token_id for part in parts for token_id in part.token_ids]
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()]
    last, raw = parts[-1], msgspec.Raw(msgspec.json.encode(ids))
    return [_Choice(0, raw, last.finish_reason or "", _Logprobs(entries), last.weight_versions, last.routed_experts)]


def heard_tokens(line: bytes) -> list[int]:
    """Return the new tokens in a line of a stream. Raises InvalidResponse for the server's error, or another line."""
    if not line or line == _END:
        return []
    try:
        heard = _HEARD.decode(line.removeprefix(_DATA))
    except msgspec.MsgspecError as error:
        raise InvalidResponse(f"not a line of a stream ({error}): {line[:80].decode(errors='replace')!r}") from error
    if heard.error:
        raise InvalidResponse(f"it failed during the response: {bytes(heard.error)[:300].decode(errors='replace')}")
    return [token_id for part in heard.choices for token_id in part.token_ids]


def _response(choice: _Choice, max_tokens: int) -> Response:
    content = (choice.logprobs and choice.logprobs.content) or []
    count = len(content)
    token_ids = np.fromiter(map(attrgetter("token_id"), content), np.int32, count)
    listed = _IDS.decode(choice.token_ids)
    ids = np.fromiter(listed, np.int32, len(listed))
    if ids.size > max_tokens:
        raise InvalidResponse(f"got {ids.size} tokens; at most {max_tokens} were requested")
    if not np.array_equal(ids, token_ids):
        raise InvalidResponse(f"the {ids.size} token ids do not match the {count} log-prob entries")
    if count and token_ids.min() < 0:
        raise InvalidResponse(f"invalid token_ids: {token_ids.min()} is negative")
    logprobs = np.fromiter(map(attrgetter("logprob"), content), np.float32, count)
    routes = None if choice.routed_experts is None else read_routes(choice.routed_experts)
    return Response(token_ids, logprobs, choice.finish_reason, tuple(choice.weight_versions or ()), routes=routes)


def joined(first: Response, more: Response) -> Response:
    """Join an aborted response with its continuation; weight version spans shift to positions in the joined one."""
    written = first.token_ids.size
    later = [Span(span.version, span.start + written, span.end + written) for span in more.spans]
    return replace(
        more,
        token_ids=np.concatenate([first.token_ids, more.token_ids]),
        logprobs=np.concatenate([first.logprobs, more.logprobs]),
        spans=(*first.spans, *later),
        joined=True,
        forced=first.forced,
        routes=joined_routes(first.routes, more.routes),
    )


class Ending(NamedTuple):
    """Where a response ends: its number of tokens, its text, and the stop string that ended it ("" if none did)."""

    num_tokens: int
    text: str
    stop_string: str


def find_ending(
    token_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    stop: Sequence[str],
    include_stop: bool,
    start: int = 0,
) -> Ending:
    """Return where the first complete stop string ends the response. A stop string begins after the first `start`
    tokens.

    The last token is the one that completes the stop string; it may have more characters, which the text leaves out.
    The text ends after the stop string with `include_stop`, else before it. If two strings are complete at the same
    character, the first of `stop` counts, as in vLLM.
    """
    if start:
        later = find_ending(token_ids[start:], decode, stop, include_stop)
        count = start + later.num_tokens
        text, cut = decode(token_ids[:count]), len(decode(token_ids[start:count])) - len(later.text)
        return Ending(count, text[: len(text) - cut], later.stop_string)
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
