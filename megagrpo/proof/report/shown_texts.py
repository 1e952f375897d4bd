"""Texts of prompts and responses as the page shows them: printable, and short."""

from __future__ import annotations

import json
from typing import Any

from megagrpo.platform.process.terminal import printable

MAX_CHARACTERS = 4000  # of one response, and of one message of a prompt
LEFT_OUT = "\n[… {:,} characters left out …]\n"


def text_of(value: Any, most: int = MAX_CHARACTERS) -> str:
    """Return a value as printable text; of a text of more than `most` characters the beginning and the end."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    if len(text) > most:
        first = most * 3 // 4
        last = most - first
        text = text[:first] + LEFT_OUT.format(len(text) - most) + text[-last:]
    return printable(text)


def messages_of(prompt: Any) -> list[list[str]]:
    """Return a prompt as pairs of role and text."""
    if not isinstance(prompt, list):
        return [["user", text_of(prompt)]]
    return [
        [text_of(m.get("role", "")), text_of(m.get("content"))] if isinstance(m, dict) else ["", text_of(m)]
        for m in prompt
    ]
