r"""Reads and writes overrides `section.key=value`. The type of the key says how the text after the first `=` is read.

- Text (a string, a path, a choice): the text as it is typed. Quotes, `#`, `:`, spaces and escapes are characters like
  any other. `null` clears a key that may be empty, and `\null` is the text `null` there.
- A list or a mapping of texts: YAML whose plain values are texts, so `[1e3, off]` holds two texts.
- A boolean or one text: a boolean if it is `true` or `false`, else text.
- A list of texts or one text: a list if it begins with `[`, else text.
- Any other key: YAML as in a file. A comment is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from megagrpo.config.basics.paths import anchored
from megagrpo.config.basics.problems import ConfigError
from megagrpo.config.basics.yaml_text import ODD_TEXT, flow_text, odd_text, parse_yaml, shortened
from megagrpo.config.run_config import RunConfig

_NULL = "null"
_ESCAPED_NULL = re.compile(r"\\*null")


def read_override(override: str, absolute: bool = True) -> tuple[str, Any]:
    """Return key and value of `key=value`. With `absolute` relative paths in the value become absolute; they count from
    the current folder. Raises ConfigError for an invalid override."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not all(key.split(".")) or ODD_TEXT.search(key):
        raise ConfigError(f"{shortened(override)}: not an override; write section.key=value")
    value = _value(types_of(RunConfig, key) or [str], key, text)  # validation rejects an unknown key
    for part in reversed(key.split(".")):
        value = {part: value}
    value = anchored(value, Path()) if absolute else value
    for part in key.split("."):
        value = value[part]
    return key, value


def override_text(key: str, value: Any) -> str:
    """Return `key=value`, which `read_override` reads back. Raises ConfigError if a text key gets another type."""
    types = types_of(RunConfig, key)
    if is_text(types) and isinstance(value, str):
        return f"{key}={chr(92) * (NoneType in types and bool(_ESCAPED_NULL.fullmatch(value)))}{value}"
    is_boolean = bool in types and isinstance(value, bool)
    if is_text(types) and value is not None and not is_boolean and not any(map(holds_texts, types)):
        raise ConfigError(f"{key}: must be a string (got {shortened(repr(value))}); put it in quotes")
    return f"{key}={flow_text(value)}"


def absolute_override(override: str) -> str:
    """Return the override with absolute paths, for a process with another current folder; an invalid one as it is."""
    try:
        key, typed = read_override(override, absolute=False)
        value = read_override(override)[1]
    except ConfigError:
        return override
    return override if value == typed else override_text(key, value)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set `a.b=c` in place; a number in the key, or an element's `name`, is a list index. Raises ConfigError for an
    invalid override."""
    key, value = read_override(override)
    *parents, last = key.split(".")
    here: Any = values
    for i, part in enumerate(parents):
        if isinstance(here, dict) and here.get(part) is None:
            here[part] = {}
        here = here[_index(here, part, key)] if isinstance(here, list) else here[part]
        if not isinstance(here, (dict, list)):
            raise ConfigError(
                f"{key}: {'.'.join(parents[: i + 1])} is a scalar and has no keys (got {shortened(repr(here))})"
            )
    here[_index(here, last, key) if isinstance(here, list) else last] = value


def _index(elements: list[Any], part: str, key: str) -> int:
    names = [element.get("name") if isinstance(element, dict) else None for element in elements]
    if part in names:
        return names.index(part)
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(elements):
        named = f", named {', '.join(filter(None, map(str, names)))}" if any(names) else ""
        raise ConfigError(f"{key}: the list has elements 0 to {len(elements) - 1}{named} (got {part!r})")
    return int(part)


def _value(types: list[Any], key: str, text: str) -> Any:
    """Return the value that `text` is for a key of these types. Raises ConfigError for text that is not valid."""
    if NoneType in types and text == _NULL:
        return None
    if bool in types and text in ("true", "false"):
        return text == "true"
    lists = any(map(holds_texts, types))
    is_mapping = text.startswith("{") and any(get_origin(kind) is dict for kind in types)
    if not is_text(types) or is_mapping or (lists and text.startswith("[")):
        return parse_yaml(text, f"{key}={text}", texts=lists, comments=False)
    if odd := odd_text(text):
        raise ConfigError(f"{key}: {odd}")
    return text[1:] if NoneType in types and text.startswith("\\") and _ESCAPED_NULL.fullmatch(text) else text


def types_of(model: type[BaseModel], key: str) -> list[Any]:
    """Return the types that the value at a dotted key may have; empty for an unknown key."""
    types: list[Any] = [model]
    for part in key.split("."):
        types = [inner for kind in types for inner in _inside(kind, part)]
    return types


def _inside(kind: Any, part: str) -> list[Any]:
    """Return the types of the element `part` of a section, a list or a mapping; empty when there is none."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _members(kind.model_fields[part].annotation) if part in kind.model_fields else []
    if get_origin(kind) in (list, dict):
        return _members(get_args(kind)[-1])
    return [Any] if kind is Any else []


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union, without metadata."""
    if hasattr(annotation, "__metadata__"):
        return _members(annotation.__origin__)
    if get_origin(annotation) in (Union, UnionType):
        return [member for inside in get_args(annotation) for member in _members(inside)]
    return [annotation]


def is_text(types: list[Any]) -> bool:
    """Whether one of the types is text: a string, or a choice of strings."""
    return any(kind is str or get_origin(kind) is Literal for kind in types)


def holds_texts(kind: Any) -> bool:
    """Whether a type is a list or a mapping of texts."""
    return get_origin(kind) in (list, dict) and is_text(_members(get_args(kind)[-1]))
