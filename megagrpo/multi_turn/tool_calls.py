"""Parsing of tool calls in a policy's text."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Parse tool calls in the format of Hermes and Qwen models. Returns the text before the first call, and the calls.

    A call is a JSON object with `name` and `arguments` between <tool_call> and </tool_call>. An invalid call has only `error`.
    """
    bodies = _CALL.findall(text)
    if not bodies:
        return text, []
    return text[: text.index("<tool_call>")].strip(), [_call(body.strip()) for body in bodies]


def _call(body: str) -> dict[str, Any]:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return {"error": f"the tool call is not valid JSON: {error}"}
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return {"error": 'the tool call has no name; write {"name": ..., "arguments": {...}}'}
    return named_call(call["name"], call.get("arguments", {}))


def named_call(name: str, arguments: Any) -> dict[str, Any]:
    """Build a call of tool `name`. `arguments` may be a JSON text, as in OpenAI's format. Invalid arguments give only `error`."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return {"error": f"the arguments of {name} are not valid JSON: {error}"}
    if not isinstance(arguments, dict):
        return {"error": f"the arguments of {name} must be an object, not {json.dumps(arguments)[:100]}"}
    return {"name": name, "arguments": arguments}


def as_message(content: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Build an assistant message in OpenAI's format; invalid calls are left out."""
    tool_calls = [{"type": "function", "function": call} for call in calls if "error" not in call]
    return {"role": "assistant", "content": content} | ({"tool_calls": tool_calls} if tool_calls else {})
