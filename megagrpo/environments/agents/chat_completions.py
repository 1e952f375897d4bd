"""OpenAI's chat completions: requests, responses and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megagrpo.environments.agents.agent_requests import (
    Ask,
    Reply,
    checked_stop,
    checked_tools,
    ignored,
    positive,
    refuse,
)
from megagrpo.environments.agents.trajectory import Refused, plain
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
    if (body.get("response_format") or {"type": "text"}).get("type") != "text":
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
    return _head(reply, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def events(reply: Reply, body: dict[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the chunks of a stream, each with the name of its event."""
    head = _head(reply, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": reply.content}]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(reply.calls)]
    for delta in deltas:
        yield None, head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield None, head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, head | {"choices": [], "usage": _usage(reply)}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.number}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: Reply) -> dict[str, int]:
    counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    return counts | {"total_tokens": sum(counts.values())}
