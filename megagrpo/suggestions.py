"""Hints at the end of messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5, form: str = "`{}`") -> str:
    """Return `; did you mean `x`?` for the nearest known word, written as `form`; empty without a word at least
    `cutoff` similar, from 0 to 1."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {form.format(near[0])}?" if near else ""
