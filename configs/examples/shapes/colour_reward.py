"""Scores the colour that a response names by its first letter."""

from __future__ import annotations

from typing import Any


def names_colour(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 if the response begins with the letter of the colour, else 0."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.startswith(letter)) for text, letter in zip(texts, answer, strict=True)]
