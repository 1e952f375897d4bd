"""OpenAI's Responses, as far as agents use them: text, function calls and their results, streams of whole items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megagrpo.environments.agents.agent_requests import Ask, Reply, checked_tools, ignored, positive, refuse
from megagrpo.environments.agents.trajectory import Message, Refused, plain
from megagrpo.types import SamplingParams

_KNOWN = (
    *("background", "conversation", "include", "input", "instructions", "max_output_tokens"),
    *("previous_response_id", "prompt", "text", "tools"),
)


def read(body: dict[str, Any], sampling: SamplingParams) -> Ask:
    """Return what a request asks for. Raises Refused for what the address does not support."""
    refuse(body, "previous_response_id", "conversation", "background", "prompt")
    if ((body.get("text") or {}).get("format") or {"type": "text"}).get("type") != "text":
        raise Refused("text.format is not supported: ask for the format in the prompt", "unsupported_parameter")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise Refused("input must be text or a list with at least one item", "invalid_messages", param="input")
    if body.get("instructions"):
        items = [{"role": "system", "content": body["instructions"]}, *items]
    return Ask(
        messages=[plain(message) for message in _messages(items)],
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
        kind = item.get("type", "message") if isinstance(item, dict) else None
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
            turn = {"role": "assistant", "content": item["content"]}
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
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": _items(reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": counts
        | {
            "total_tokens": sum(counts.values()),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _items(reply: Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "content": [part]})
    for i, call in enumerate(reply.calls):
        item = {"id": f"fc_{reply.number}_{i}", "type": "function_call", "call_id": call["id"], **call["function"]}
        items.append(item)
    return [item | {"status": "completed"} for item in items]


def events(reply: Reply, body: dict[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield the events of a stream, each with its name."""
    whole = response(reply)
    steps: list[tuple[str, dict[str, Any]]] = [
        (name, {"response": whole | {"status": "in_progress", "output": [], "usage": None}})
        for name in ("response.created", "response.in_progress")
    ]
    for i, item in enumerate(whole["output"]):
        where = {"output_index": i, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        steps.append(("response.output_item.added", where | {"item": item | empty | {"status": "in_progress"}}))
        steps += _parts(item, where)
        steps.append(("response.output_item.done", where | {"item": item}))
    steps.append((f"response.{whole['status']}", {"response": whole}))
    for number, (name, data) in enumerate(steps):
        yield name, {"type": name, "sequence_number": number, **data}


def _parts(item: dict[str, Any], where: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events between the beginning and the end of an item."""
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", where | {"delta": arguments}
        yield "response.function_call_arguments.done", where | {"arguments": arguments, "name": item["name"]}
        return
    (part,), where = item["content"], where | {"content_index": 0}
    yield "response.content_part.added", where | {"part": part | {"text": ""}}
    yield "response.output_text.delta", where | {"delta": part["text"], "logprobs": []}
    yield "response.output_text.done", where | {"text": part["text"], "logprobs": []}
    yield "response.content_part.done", where | {"part": part}
