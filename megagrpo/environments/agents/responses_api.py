"""OpenAI's Responses, as far as agents use them: text, function calls and their results, streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megagrpo.environments.agents.agent_messages import Message, Refused, plain
from megagrpo.environments.agents.agent_requests import (
    Ask,
    Reply,
    checked_tools,
    ignored,
    is_plain_text,
    positive,
    refuse,
)
from megagrpo.types import SamplingParams

_KNOWN = (
    *("background", "conversation", "include", "input", "instructions", "max_output_tokens"),
    *("previous_response_id", "prompt", "text", "tools"),
)


_FIELDS = {"function_call": ("name", "arguments", "call_id"), "function_call_output": ("call_id", "output")}


def read(body: dict[str, Any], sampling: SamplingParams) -> Ask:
    """Return what a request asks for. Raises Refused for what the address does not support."""
    refuse(body, "previous_response_id", "conversation", "background", "prompt")
    text = body.get("text") or {}
    if not isinstance(text, dict) or not is_plain_text(text.get("format")):
        raise Refused("text.format is not supported: ask for the format in the prompt", "unsupported_parameter")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise Refused("input must be text or a list with at least one item", "invalid_messages", param="input")
    if body.get("instructions"):
        items = [{"role": "system", "content": body["instructions"]}, *items]
    messages = [plain(message) for message in _messages(items)]
    if not messages:
        raise Refused("input has no message: only items of reasoning", "invalid_messages", param="input")
    return Ask(
        messages=messages,
        tools=checked_tools([_tool(tool) for tool in body.get("tools") or ()]),
        max_tokens=positive(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        parses_calls=body.get("tool_choice") != "none",
        model=str(body.get("model") or Ask.model),
        ignored=ignored(body, sampling, _KNOWN),
    )


def _messages(items: list[Any]) -> Iterator[Message]:
    """Yield the messages of items. Text and calls that follow each other are one message of the assistant."""
    turn: Message | None = None
    for item in items:
        kind = str(item.get("type", "message")) if isinstance(item, dict) else ""
        if missing := [name for name in _FIELDS.get(kind, ()) if name not in item]:
            raise Refused(f"items of type {kind} need {', '.join(missing)}", "invalid_messages", param="input")
        if kind == "reasoning":  # of another model: the policy's thoughts are in its text
            continue
        if kind == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            turn = turn or {"role": "assistant", "content": ""}
            calls = [*turn.get("tool_calls", ()), {"id": item["call_id"], "type": "function", "function": call}]
            turn |= {"tool_calls": calls}
            continue
        if turn is not None:
            yield turn
            turn = None
        if kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        elif kind == "message" and item.get("role") == "assistant":
            turn = {"role": "assistant", "content": item.get("content")}
        elif kind == "message":
            yield {"role": item.get("role"), "content": item.get("content")}
        else:
            raise Refused(f"items of type {kind} are not supported", "unsupported_content", param="input")
    if turn is not None:
        yield turn


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return None  # it is refused
    return {"type": "function", "function": {n: tool[n] for n in ("name", "description", "parameters") if n in tool}}


def response(reply: Reply) -> dict[str, Any]:
    """Return a response."""
    cut = reply.finish_reason == "length"
    counts = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    return _opened(reply.ask) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply),
        "usage": counts
        | {
            "total_tokens": sum(counts.values()),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _opened(ask: Ask) -> dict[str, Any]:
    """Return a response of which nothing has come yet."""
    return {
        "id": f"resp_{ask.number}",
        "object": "response",
        "created_at": ask.created,
        "model": ask.model,
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": None,
    }


def _items(reply: Reply) -> list[dict[str, Any]]:
    items = [_message(reply.ask, reply.content)] if reply.content or not reply.calls else []
    for i, call in enumerate(reply.calls):
        item = {"id": f"fc_{reply.ask.number}_{i}", "type": "function_call", "call_id": call["id"], **call["function"]}
        items.append(item)
    return [item | {"status": "completed"} for item in items]


def _message(ask: Ask, text: str) -> dict[str, Any]:
    return {"id": f"msg_{ask.number}", "type": "message", "role": "assistant", "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


Event = tuple[str, dict[str, Any]]


class Events:
    """The events of a stream: pairs of a name and the data. `last` ends it."""

    error_name, last = "error", b""

    def __init__(self, ask: Ask, body: dict[str, Any]):
        self._ask, self._number, self._begun = ask, 0, False

    def text(self, text: str) -> Iterator[Event]:
        """Yield the events for more text of the turn."""
        if not self._begun:
            yield from self._begin()
            item = _message(self._ask, "") | {"content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **self._where, part=_part(""))
        yield self._event("response.output_text.delta", **self._where, delta=text, logprobs=[])

    def end(self, reply: Reply) -> Iterator[Event]:
        """Yield the events after the whole text."""
        if not self._begun:
            yield from self._begin() if reply.calls else self.text("")
        whole = response(reply)
        for i, item in enumerate(whole["output"]):
            yield from self._end_message(item) if item["type"] == "message" else self._call(i, item)
        yield self._event(f"response.{whole['status']}", response=whole)

    @property
    def _where(self) -> dict[str, Any]:
        return {"output_index": 0, "content_index": 0, "item_id": f"msg_{self._ask.number}"}

    def _event(self, name: str, /, **data: Any) -> Event:
        self._number += 1
        return name, {"type": name, "sequence_number": self._number - 1, **data}

    def _begin(self) -> Iterator[Event]:
        self._begun = True
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=_opened(self._ask))

    def _end_message(self, item: dict[str, Any]) -> Iterator[Event]:
        (part,) = item["content"]
        yield self._event("response.output_text.done", **self._where, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._where, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call(self, index: int, item: dict[str, Any]) -> Iterator[Event]:
        where, arguments = {"output_index": index, "item_id": item["id"]}, item["arguments"]
        empty = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=empty)
        yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
        yield self._event("response.function_call_arguments.done", **where, arguments=arguments, name=item["name"])
        yield self._event("response.output_item.done", output_index=index, item=item)
