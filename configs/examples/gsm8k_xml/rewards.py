r"""The five rewards of the Unsloth notebook for GSM8K. A completion has <reasoning> and <answer> tags, the answer is a
whole number, and the maximum sum is 3.5.

Each scores exactly as the notebook's function does, including its errors; `fixed: true` corrects the errors that the
docstrings name. In the first three, a tag that the chat template opened (`prefixes`) counts as part of the completion.
Unlike the notebook's, they print nothing: the console and completions.jsonl show completions.
"""

from __future__ import annotations

import re
from typing import Any

from megagrpo.rewards.functions.text_rewards import last_number, text_of, whole_texts

_STRICT = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
_SOFT = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
_WHOLE = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")


def xml_answer(text: str) -> str:
    """Return the text between the last <answer> and the next </answer>, stripped; the whole text without tags."""
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def xmlcount(completions: list[Any], fixed: bool = False, prefixes: list[str] | None = None) -> list[float]:
    r"""Return 0.125 for each of the four tags that occurs exactly once on a line of its own, minus 0.001 per character
    after </answer>.

    The notebook applies the penalty twice. With "\n<answer>\n" it counts the text after "\n</answer>\n", or the whole
    text without that tag. With "\n</answer>" it counts one character less than follows, so a text that ends there gains
    0.001. `fixed` counts the characters after "\n</answer>" once, without one final newline.
    """
    return [_xmlcount(text, fixed) for text in whole_texts(completions, prefixes)]


def _xmlcount(text: str, fixed: bool) -> float:
    tags = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    occurs_once = [text.count(tag) == 1 for tag in tags]
    score = 0.125 * sum(occurs_once)
    tail = text.split("\n</answer>")[-1]
    if fixed:
        return score - 0.001 * len(tail.removeprefix("\n")) if occurs_once[3] else score
    if occurs_once[2]:
        score -= 0.001 * len(text.split("\n</answer>\n")[-1])
    if occurs_once[3]:
        score -= 0.001 * (len(tail) - 1)
    return score


def soft_format(completions: list[Any], fixed: bool = False, prefixes: list[str] | None = None) -> list[float]:
    """Return 0.5 for a completion that begins with <reasoning>...</reasoning> <answer>...</answer>.

    The notebook's pattern allows no line break inside the tags, so it rejects the format of its own system prompt;
    `fixed` allows line breaks.
    """
    pattern = re.compile(_SOFT, re.DOTALL if fixed else 0)
    return [0.5 if pattern.match(text) else 0.0 for text in whole_texts(completions, prefixes)]


def strict_format(completions: list[Any], fixed: bool = False, prefixes: list[str] | None = None) -> list[float]:
    """Return 0.5 for exactly: each tag on its own line, one line of reasoning, one line of answer, a final newline.

    `fixed` allows several lines inside, and a missing final newline.
    """
    pattern = re.compile(_STRICT.replace(r"\n$", r"\n?\Z"), re.DOTALL) if fixed else re.compile(_STRICT)
    return [0.5 if pattern.match(text) else 0.0 for text in whole_texts(completions, prefixes)]


def whole_number(completions: list[Any], fixed: bool = False) -> list[float]:
    """Return 0.5 when the answer is a whole number by `str.isdigit`, which accepts a superscript two and rejects "-5".

    `fixed` accepts ASCII digits, a sign and thousands separators.
    """
    answers = [xml_answer(text_of(c)) for c in completions]
    return [0.5 if (_WHOLE.fullmatch(a) if fixed else a.isdigit()) else 0.0 for a in answers]


def correctness(completions: list[Any], answer: list[Any], fixed: bool = False) -> list[float | None]:
    """Return 2.0 when the answer equals the text of column `answer`, else 0.0.

    `fixed` compares numbers, so "1,000", "1000.0" and "$1000" equal 1000. It returns None if `answer` has no number.
    """
    answers = [xml_answer(text_of(c)) for c in completions]
    if not fixed:
        return [2.0 if a == gold else 0.0 for a, gold in zip(answers, answer, strict=True)]
    golds = [last_number(str(gold)) for gold in answer]
    return [None if gold is None else 2.0 * (last_number(a) == gold) for a, gold in zip(answers, golds, strict=True)]
