"""What a response answers, as text that can be compared with another's: the votes of maj@k. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable

from megagrpo.rewards.functions.text import last_number

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SPACE = re.compile(r"\s+")

# What the built-in functions that know right from wrong read.
READ_BY = {
    "exact_number": "number",
    "accuracy": "boxed",
    "reasoning_accuracy": "boxed",
    "correctness": "tag",
    "reasoning_gym": "tag",
}


def number(text: str) -> str | None:
    """The last number, "1,000" and "1000.0" as "1000"; None without one."""
    found = last_number(text)
    return None if found is None else f"{found.normalize():f}"


def tag(text: str) -> str | None:
    """What the last <answer>...</answer> holds, white space made single; None without one."""
    found = _TAG.findall(text)
    return _plain(found[-1]) if found else None


def boxed(text: str) -> str | None:
    r"""What the last <answer> holds, or else the last \boxed{...}, braces paired, without spaces and dollar signs; None without either."""
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
    """The whole response, white space made single; None when it is empty."""
    return _plain(text)


def _plain(text: str) -> str | None:
    return _SPACE.sub(" ", text).strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {"number": number, "tag": tag, "boxed": boxed, "text": text}


def extractor(answer: str, function: str) -> Callable[[str], str | None] | None:
    """How to read answers: as `evaluation.answer` says, or as the built-in reward function reads them; None where nothing is known."""
    kind = READ_BY.get(function) if answer == "auto" else answer
    return EXTRACTORS[kind] if kind else None
