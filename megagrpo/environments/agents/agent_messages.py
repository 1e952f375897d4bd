"""An agent's messages: checked, in the form for chat templates, and digests that find a history again."""

from __future__ import annotations

import hashlib
import itertools
import json
import json.scanner
from collections.abc import Sequence
from typing import Any

from megagrpo.rewards.functions.text_rewards import encodable

Message = dict[str, Any]
_MOST_AT_ONCE = 1 << 14  # values that one call of `json` may read or write, which no other thread interrupts


class _Interruptible(json.JSONDecoder):
    """A decoder in Python: other threads go on while it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # typeshed lacks it


class Refused(Exception):
    """A request that gets an error in OpenAI's format: `code`, and the HTTP status."""

    def __init__(self, message: str, code: str, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.code, self.status, self.param = code, status, param


def plain(message: Message) -> Message:
    """Return a message as OpenAI's clients may send it with text as its content, and without fields that have no value.

    Raises Refused for content other than text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("each message must be an object with a role", "invalid_messages", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(map(_is_text, content)):
            raise Refused(
                "only text is supported as content: leave out images, audio and files",
                "unsupported_content",
                param="messages",
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise Refused("content must be text", "unsupported_content", param="messages")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise Refused(f"{name} must be text", "invalid_messages", param="messages")
    if not all(map(_is_call, message.get("tool_calls") or ())):
        raise Refused(
            "tool calls must be calls of functions with a name, and with an id that is text",
            "invalid_messages",
            param="messages",
        )
    kept = {name: message[name] for name in ("name", "tool_calls", "tool_call_id") if message.get(name)}
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": encodable(content or ""), **kept}


def _is_text(part: Any) -> bool:
    kinds = (None, "text", "input_text", "output_text")
    return isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    match call:
        case {"function": {"name": str()}}:
            return isinstance(call.get("id"), str | None)
    return False


def read_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request, whatever charset its header names: JSON is UTF-8, UTF-16 or UTF-32. Raises
    Refused."""
    try:
        value = read_json(body.decode(json.detect_encoding(body)))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("the body is no JSON object, or is nested too deeply", "invalid_json")
    return value


def read_json(text: str) -> Any:
    """Return a JSON value whose texts have UTF-8 bytes: lone surrogates are replaced. Raises ValueError if it is not
    JSON, RecursionError if it is nested too deeply. A text with many values is read so that other threads go on."""
    loads = _Interruptible().decode if sum(map(text.count, "[{,")) > _MOST_AT_ONCE else json.loads
    value = loads(text)
    if "\\ud" in text.lower():
        value = loads(encodable(write_json(value, ensure_ascii=False)))
    return value


def write_json(value: Any, **options: Any) -> str:
    """Return a value as JSON, as `json.dumps` does with these options, but other threads go on meanwhile."""
    rest, count = [value], 0
    while rest and count <= _MOST_AT_ONCE:
        match rest.pop():
            case dict() as item:
                rest.extend(item.values())
            case list() as item:
                rest.extend(item)
        count += 1
    # the encoder in Python leaves cycles of references behind, so it is for large values only
    return "".join(json.JSONEncoder(**options).iterencode(value)) if rest else json.dumps(value, **options)


def histories(messages: Sequence[Message]) -> list[bytes]:
    """Return a digest of each beginning of the messages, by role, text, tool calls and the ids of calls."""
    return list(itertools.accumulate(messages, history_after, initial=b""))[1:]


def history_after(before: bytes, message: Message) -> bytes:
    """Return the digest of the messages with the digest `before`, and one more."""
    calls = [[call.get("id"), call["function"]["name"], _arguments(call)] for call in message.get("tool_calls", ())]
    what = [message["role"], message["content"], calls, message.get("tool_call_id")]
    return hashlib.blake2b(before + write_json(what, sort_keys=True).encode(), digest_size=16).digest()


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the names of the tools in the results, which some templates show."""
    names = {call.get("id"): call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    return [
        {"name": names[m["tool_call_id"]], **m} if m.get("tool_call_id") in names and m["role"] == "tool" else m
        for m in messages
    ]


def shown(messages: Sequence[Message]) -> list[Message]:
    """Return the messages for a chat template: the arguments of calls as objects, as templates expect."""
    return [
        m | {"tool_calls": [_with_object(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in with_names(messages)
    ]


def _with_object(call: Message) -> Message:
    return call | {"function": call["function"] | {"arguments": _arguments(call)}}


def _arguments(call: Message) -> Any:
    """Return a call's arguments as a value; as text if they are no JSON. A call without any has an empty object."""
    arguments = call["function"].get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        return read_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
