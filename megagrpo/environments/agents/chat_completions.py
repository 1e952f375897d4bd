"""OpenAI's chat completions: requests, responses and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megagrpo.environments.agents.agent_messages import Refused, plain
from megagrpo.environments.agents.agent_requests import (
    Ask,
    Reply,
    checked_stop,
    checked_tools,
    ignored,
    is_plain_text,
    positive,
    refuse,
)
from megagrpo.types import SamplingParams

_KNOWN = (
    *("audio", "functions", "logprobs", "max_completion_tokens", "max_tokens", "messages"),
    *("n", "response_format", "stop", "tools"),
)


def read(body: dict[str, Any], sampling: SamplingParams) -> Ask:
    """Return what a request asks for. Raises Refused for what the address does not support."""
    refuse(body, "logprobs", "functions", "audio")
    if body.get("n") not in (None, 1):
        raise Refused("n must be 1: ask several times", "unsupported_parameter", param="n")
    if not is_plain_text(body.get("response_format")):
        raise Refused("response_format is not supported: ask for the format in the prompt", "unsupported_parameter")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with at least one message", "invalid_messages", param="messages")
    if not isinstance(body.get("stream_options"), dict | None):
        raise Refused("stream_options must be an object", "invalid_value", param="stream_options")
    return Ask(
        messages=[plain(message) for message in messages],
        tools=checked_tools(body.get("tools")),
        max_tokens=positive(body, "max_completion_tokens", "max_tokens"),
        stop=checked_stop(body.get("stop")),
        stream=bool(body.get("stream")),
        parses_calls=body.get("tool_choice") != "none",
        model=str(body.get("model") or Ask.model),
        ignored=ignored(body, sampling, _KNOWN),
    )


def response(reply: Reply) -> dict[str, Any]:
    """Return a response."""
    message = reply.message | {"content": reply.content or None if reply.calls else reply.content, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
    return _head(reply.ask, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


class Events:
    """The events of a stream: pairs of a name, of which chat completions have none, and the data. `last` ends it."""

    error_name, last = None, b"data: [DONE]\n\n"

    def __init__(self, ask: Ask, body: dict[str, Any]):
        self._head, self._begun = _head(ask, "chat.completion.chunk"), False
        self._shows_usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def text(self, text: str) -> Iterator[tuple[None, dict[str, Any]]]:
        """Yield the events for more text of the turn."""
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        yield self._chunk(role | {"content": text})

    def end(self, reply: Reply) -> Iterator[tuple[None, dict[str, Any]]]:
        """Yield the events after the whole text."""
        if not self._begun:
            yield from self.text("")
        for i, call in enumerate(reply.calls):
            yield self._chunk({"tool_calls": [{"index": i, **call}]})
        yield self._chunk({}, reply.finish_reason)
        if self._shows_usage:
            yield None, self._head | {"choices": [], "usage": _usage(reply)}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> tuple[None, dict[str, Any]]:
        return None, self._head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _head(ask: Ask, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{ask.number}", "object": kind, "created": ask.created, "model": ask.model}


def _usage(reply: Reply) -> dict[str, int]:
    counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    return counts | {"total_tokens": sum(counts.values())}
