"""Parsing of tool calls in a policy's text."""

from __future__ import annotations

import json
import re
from typing import Any

CALL_OPENING = "<tool_call>"  # of a call in the format of Hermes
_CLOSE = "</tool_call>"
_TAG = re.compile(r"<tool_call>|</?think>")
_AFTER_INVALID = re.compile(r"</tool_call>|(?=</think>)")
_JSON = json.JSONDecoder()
_LONGEST_ESCAPE = 16  # characters: within this distance of its end, a cut text may be invalid only because it was cut


def hermes(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Parse tool calls in the format of Hermes and Qwen models. Returns the text before the first call, and the calls.

    A call is a JSON object with `name` and `arguments` between <tool_call> and </tool_call>; its strings may contain
    any text, also these tags. At the end of the text </tool_call> may be missing. An invalid call has only `error`.
    Calls in a thought do not count: between <think> and </think>, before </think> alone, or after an open <think>.
    """
    calls: list[dict[str, Any]] = []
    first, position = len(text), 0
    while tag := _TAG.search(text, position):
        position = tag.end()
        if tag[0] == "<think>":
            closing = text.find("</think>", position)
            position = closing + len("</think>") if closing >= 0 else len(text)
        elif tag[0] == "</think>":
            calls, first = [], len(text)
        else:
            first = min(first, tag.start())
            call, position = _call(text, position)
            calls.append(call)
    return (text[:first].strip(), calls) if calls else (text, [])


def _call(text: str, begin: int) -> tuple[dict[str, Any], int]:
    """Return the call that begins at `begin`, after its tag, and where the text goes on after it."""
    begin = _skip_space(text, begin)
    try:
        call, end = _json_value(text, begin)
        end = _skip_space(text, end)
        if text.startswith(_CLOSE, end):
            end += len(_CLOSE)
        elif end < len(text) and not text.startswith(CALL_OPENING, end):
            raise ValueError(f"</tool_call> must follow the object, not {text[end : end + 20]!r}")
    except (ValueError, RecursionError) as error:
        after = _AFTER_INVALID.search(text, begin)
        return {"error": f"the tool call is not valid JSON: {error}"}, len(text) if after is None else after.end()
    return _named(call), end


def _skip_space(text: str, index: int) -> int:
    while text[index : index + 1].isspace():
        index += 1
    return index


def _json_value(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value at `begin` and its end. An error names the position in the value.

    It parses copies of growing length: an error would count the line breaks of all text before it.
    """
    size = 1024
    while True:
        cut = text[begin : begin + size]
        try:
            value, end = _JSON.raw_decode(cut)
            if end < len(cut) or begin + size >= len(text):  # a number may go on
                return value, begin + end
        except json.JSONDecodeError as error:
            is_cut = error.pos > len(cut) - _LONGEST_ESCAPE or error.msg.startswith("Unterminated string")
            if begin + size >= len(text) or not is_cut:
                raise
        size *= 2


def _named(call: Any) -> dict[str, Any]:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):  # OpenAI's format
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return {"error": 'the tool call has no name; write {"name": ..., "arguments": {...}}'}
    return named_call(call["name"], call.get("arguments", call.get("parameters")))


def named_call(name: str, arguments: Any) -> dict[str, Any]:
    """Build a call of tool `name`. `arguments` may be a JSON text, as in OpenAI's format; without any the call has
    none. Invalid arguments give only `error`."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments.strip() or "{}")
        except (ValueError, RecursionError) as error:
            return {"error": f"the arguments of {name} are not valid JSON: {error}"}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return {"error": f"the arguments of {name} must be an object, not {json.dumps(arguments)[:100]}"}
    return {"name": name, "arguments": arguments}


def as_message(content: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Build an assistant message in OpenAI's format; invalid calls are left out."""
    tool_calls = [{"type": "function", "function": call} for call in calls if "error" not in call]
    return {"role": "assistant", "content": content} | ({"tool_calls": tool_calls} if tool_calls else {})
