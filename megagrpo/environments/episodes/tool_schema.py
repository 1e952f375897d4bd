"""Conversion of a Python function to the JSON schema for chat templates, in OpenAI's and transformers' format."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    type(None): "null",
}
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?):\s*$")
_ENTRY = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function or bound method with type hints and a Google-style docstring.

    Raises ValueError, naming function and argument, if a type or description is missing: the policy would guess.
    """
    name = function.__name__
    summary, described = _docstring(function)
    if not summary:
        raise ValueError(f"tool `{name}` has no docstring; describe the tool in one, with an `Args:` section")
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool `{name}` takes *{parameter.name}; give its arguments names")
        if parameter.name not in hints:
            raise ValueError(f"tool `{name}`: argument `{parameter.name}` has no type hint")
        if parameter.name not in described:
            raise ValueError(
                f"tool `{name}`: argument `{parameter.name}` is not described under `Args:` in its docstring"
            )
        properties[parameter.name] = _type_schema(hints[parameter.name]) | {"description": described[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the descriptions under `Args:`, each on one line."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, last, depth = "", "", None
    for line in (inspect.getdoc(function) or "").splitlines():
        if heading := _SECTION.match(line):
            section, depth = heading.group(1), None
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            entry = _ENTRY.match(line)
            if entry and (depth is None or len(entry.group(1)) <= depth):
                depth, last = len(entry.group(1)), entry.group(2)
                described[last] = entry.group(3).strip()
            elif last:
                described[last] = f"{described[last]} {line.strip()}".strip()
    return "\n".join(summary).strip(), described


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return {"type": _JSON_TYPES[type(inside[0])], "enum": list(inside)}
    if origin in (Union, types.UnionType):
        options = [_type_schema(option) for option in inside if option is not type(None)]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        return schema | ({"nullable": True} if type(None) in inside else {})
    if origin is list:
        return {"type": "array", "items": _type_schema(inside[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(inside[1])}
    raise ValueError(
        f"type {hint} has no JSON schema; use str, int, float, bool, list, dict, Literal or a union of these"
    )
