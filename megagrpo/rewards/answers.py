"""Extraction of a response's answer as comparable text, for the votes of maj@k. Imports only the standard library."""

from __future__ import annotations

import re
from collections.abc import Callable

from megagrpo.rewards.functions.text import last_number

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SPACE = re.compile(r"\s+")

# The extractor that matches what each built-in correctness function reads.
READ_BY = {
    "exact_number": "number",
    "accuracy": "boxed",
    "reasoning_accuracy": "boxed",
    "correctness": "tag",
    "reasoning_gym": "tag",
}


def number(text: str) -> str | None:
    """Return the last number, with "1,000" and "1000.0" as "1000"; None without a number."""
    value = last_number(text)
    return None if value is None else f"{value.normalize():f}"


def tag(text: str) -> str | None:
    """Return the content of the last <answer>...</answer> with single spaces; None without one."""
    matches = _TAG.findall(text)
    return _plain(matches[-1]) if matches else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last <answer>, or else of the last \boxed{...} with paired braces, without spaces and dollar signs. None
    without either."""
    inside = tag(text)
    starts = list(_BOXED.finditer(text))
    if inside is None and starts:
        begin = starts[-1].end()
        depth, end = 1, begin
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        inside = text[begin : end - 1] if not depth else None
    return None if inside is None else _SPACE.sub("", inside).strip("$")


def text(text: str) -> str | None:
    """Return the whole response with single spaces; None when it is empty."""
    return _plain(text)


def _plain(text: str) -> str | None:
    return _SPACE.sub(" ", text).strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {"number": number, "tag": tag, "boxed": boxed, "text": text}


def extractor(answer: str, function: str) -> Callable[[str], str | None] | None:
    """Return the extractor for `evaluation.answer`. "auto" means the one that matches the built-in reward function; None for other
    functions."""
    kind = READ_BY.get(function) if answer == "auto" else answer
    return EXTRACTORS[kind] if kind else None
