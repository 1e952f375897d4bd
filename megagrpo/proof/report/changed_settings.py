"""The config of a run as rows: key, value, default, whether it was changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from megagrpo.config import RunConfig
from megagrpo.config.key_table import fields
from megagrpo.platform.process.terminal import printable
from megagrpo.proof.report.privacy import SECRET_KEY, without_secrets
from megagrpo.proof.report.shown_texts import text_of


def rows(config: dict[str, Any]) -> list[list[Any]]:
    """Return [key, value, default, changed] of every key, in order. A key without a default, or that this version
    lacks, has None there and counts as changed if it has a value. Values omit home directories and credentials."""
    defaults = {
        key: PydanticUndefined if info.is_required() else info.get_default(call_default_factory=True)
        for key, info in fields(RunConfig)
    }
    found = []
    for key, value in _flat(config):
        known = defaults.get(_pattern(key, defaults), PydanticUndefined)
        default = None if known is PydanticUndefined else _text(known)
        changed = value is not None and value != known
        text = (
            "<credential>"
            if value and isinstance(value, str) and SECRET_KEY.search(key)
            else without_secrets(_text(value))
        )
        found.append([printable(key), text, default, changed])
    return found


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the scalars, and lists of scalars, below a config with their dotted keys."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for index, below in enumerate(value):
            yield from _flat(below, f"{key}.{index}")
    else:
        yield key, value


def _pattern(key: str, known: dict[str, Any]) -> str:
    """Return the key of the schema: list indices as `N`, and a name of the user as `NAME`."""
    key = re.sub(r"\.\d+(?=\.|$)", ".N", key)
    if key in known:
        return key
    parts = key.split(".")
    named = (".".join([*parts[:i], "NAME", *parts[i + 1 :]]) for i in range(1, len(parts)))
    return next((one for one in named if one in known), key)


def _text(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and all(isinstance(one, (str, int, float)) for one in value):
        return text_of(", ".join(map(_text, value)))
    return text_of(value if isinstance(value, (str, dict, list)) else str(value))
