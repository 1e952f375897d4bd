"""The config of a run as rows: key, value, default, whether it was changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import PydanticUndefined

from megagrpo.config import RunConfig
from megagrpo.config.key_table import fields
from megagrpo.platform.process.terminal import printable
from megagrpo.proof.report.privacy import SECRET_KEY, Privacy
from megagrpo.proof.report.shown_texts import text_of


def rows(config: dict[str, Any], privacy: Privacy) -> list[list[Any]]:
    """Return [key, value, default, changed] of every key, in order. A key without a default, or that this version
    lacks, has None there and counts as changed if it has a value. Values omit machine paths and credentials."""
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
            else privacy.text(_text(value))
        )
        found.append([printable(key), text, default, changed])
    return found


def tell_apart(configs: Sequence[dict[str, Any]], shown: Sequence[list[list[Any]]]) -> None:
    """Number the values of several runs that differ and are shown alike because their paths are shortened, as in
    "…/data/train.jsonl (2)". Changes `shown`, the rows of the configs."""
    originals = [{printable(key): _text(value) for key, value in _flat(config)} for config in configs]
    kinds: dict[tuple[str, str], list[str]] = {}
    for values, table in zip(originals, shown, strict=True):
        for key, text, *_ in table:
            alike = kinds.setdefault((key, text), [])
            if values[key] not in alike:
                alike.append(values[key])
    for values, table in zip(originals, shown, strict=True):
        for row in table:
            alike = kinds[row[0], row[1]]
            if len(alike) > 1:
                row[1] += f" ({alike.index(values[row[0]]) + 1})"


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
