r"""The five rewards of the Unsloth notebook for GSM8K, which add up to 3.5: <reasoning> and <answer> tags around a whole number.

Each scores exactly as the notebook's function does, oddities included, unless `fixed` is true; docstrings say what that mends. The
notebook prints the first completion of each batch; here the console and completions.jsonl show them."""

from __future__ import annotations

import re
from typing import Any

from megagrpo.rewards.functions.text import last_number, text_of

_STRICT = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
_SOFT = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
_WHOLE = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")


def xml_answer(text: str) -> str:
    """What stands between the last <answer> and the next </answer>, stripped; the whole text without tags."""
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def xmlcount(completions: list, fixed: bool = False) -> list[float]:
    r"""0.125 for each of the four tags on lines of their own that occurs exactly once, minus 0.001 per character after </answer>.

    The notebook takes the penalty twice: beside "\n<answer>\n" it counts what follows "\n</answer>\n", the whole text where that is
    missing; beside "\n</answer>" it counts one less than what follows, so that a text which ends there gains 0.001.
    `fixed` counts the characters after "\n</answer>", but for one final newline, once."""
    return [_xmlcount(text_of(c), fixed) for c in completions]


def _xmlcount(text: str, fixed: bool) -> float:
    tags = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    once = [text.count(tag) == 1 for tag in tags]
    score = 0.125 * sum(once)
    tail = text.split("\n</answer>")[-1]
    if fixed:
        return score - 0.001 * len(tail.removeprefix("\n")) if once[3] else score
    if once[2]:
        score -= 0.001 * len(text.split("\n</answer>\n")[-1])
    if once[3]:
        score -= 0.001 * (len(tail) - 1)
    return score


def soft_format(completions: list, fixed: bool = False) -> list[float]:
    """0.5 for a completion that begins with <reasoning>...</reasoning> <answer>...</answer>.

    The notebook's pattern takes no line break inside the tags, so it refuses what its own system prompt asks for; `fixed` takes it."""
    pattern = re.compile(_SOFT, re.DOTALL if fixed else 0)
    return [0.5 if pattern.match(text_of(c)) else 0.0 for c in completions]


def strict_format(completions: list, fixed: bool = False) -> list[float]:
    """0.5 for exactly the four tags on lines of their own, around one line of reasoning and one of answer, and a newline at the end.

    `fixed` allows several lines inside, and a missing final newline."""
    pattern = re.compile(_STRICT.replace(r"\n$", r"\n?\Z"), re.DOTALL) if fixed else re.compile(_STRICT)
    return [0.5 if pattern.match(text_of(c)) else 0.0 for c in completions]


def whole_number(completions: list, fixed: bool = False) -> list[float]:
    """0.5 where the answer is a whole number: digits only, by `str.isdigit`, which takes a superscript two and refuses "-5".

    `fixed` takes ASCII digits, a sign and thousands separators."""
    answers = [xml_answer(text_of(c)) for c in completions]
    return [0.5 if (_WHOLE.fullmatch(a) if fixed else a.isdigit()) else 0.0 for a in answers]


def correctness(completions: list, answer: list[Any], fixed: bool = False) -> list[float | None]:
    """2.0 where the answer is the same text as column `answer`, else 0.0.

    `fixed` compares numbers, so that "1,000", "1000.0" and "$1000" are 1000, and cannot score (None) an `answer` without a number."""
    answers = [xml_answer(text_of(c)) for c in completions]
    if not fixed:
        return [2.0 if a == gold else 0.0 for a, gold in zip(answers, answer, strict=True)]
    golds = [last_number(str(gold)) for gold in answer]
    return [None if gold is None else 2.0 * (last_number(a) == gold) for a, gold in zip(answers, golds, strict=True)]
