"""Reads a row's own settings: variables of the chat template, and sampling parameters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megagrpo.config.section import PositiveInt, Section, Temperature
from megagrpo.platform.process.hints import did_you_mean


class RowSampling(Section):
    """The sampling parameters that a row may have."""

    temperature: Temperature = 1.0
    max_tokens: PositiveInt = 1


def row_mapping(value: Any, content: str, said: str) -> dict[str, Any]:
    """Return a cell's mapping, {} for an empty cell. JSON text is read: it keeps the types of files with one schema for
    all rows. Raises ValueError, which begins with `said`, for a value that is no mapping of `content`."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{said} must be a mapping of {content} (got {value!r:.100}); correct or remove it")
    return {name: v for name, v in (value or {}).items() if v is not None}  # Arrow adds None for absent keys


def check_row_sampling(own: Mapping[str, Any], limit: int, said: str) -> None:
    """Raise ValueError, which begins with `said`, for sampling parameters that a row cannot have. `limit` is
    `rollout.max_completion_length`."""
    known = list(RowSampling.model_fields)
    for name in own:
        if name not in known:
            raise ValueError(f"{said} has `{name}`{did_you_mean(name, known)}; a row may have {', '.join(known)}")
    try:
        RowSampling(**own)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise ValueError(f"{said}: {first['loc'][0]}: {first['msg']} (got {first['input']!r:.100})") from None
    if own.get("max_tokens", 0) > limit:
        fix = "lower it, or raise the limit, for which memory is planned"
        raise ValueError(
            f"{said}: max_tokens {own['max_tokens']} is above rollout.max_completion_length {limit}; {fix}"
        )
