"""Rewards that need the standard library only. Each takes a batch and gives one float per completion, or None where it cannot score."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

# A minus is a sign only where no number, letter or bracket stands before it: "5-3" ends in 3, "x = -3" in -3.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_R1_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>\Z", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, whether it comes as a string or as a list with one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def first_answer(text: str) -> str | None:
    """Content of the first <answer>...</answer>, stripped; None without one."""
    match = _ANSWER.search(text)
    return match.group(1).strip() if match else None


def last_number(text: str) -> Decimal | None:
    """The last integer or decimal in `text`, thousands separators allowed ("1,000" is 1000; "3,4" ends in 4); None without one."""
    matches = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(matches[-1].replace(",", "")) if matches else None


def exact_number(completions: list, answer: list[Any]) -> list[float | None]:
    """1.0 where the last number of the completion equals the last number of column `answer` ("72", 72, "... #### 72"), else 0.0.

    None where `answer` holds no number."""
    golds = [last_number(str(value)) for value in answer]
    return [None if gold is None else float(last_number(text_of(c)) == gold) for c, gold in zip(completions, golds, strict=True)]


def format(completions: list) -> list[float]:
    """1.0 for exactly `<think>...</think><answer>...</answer>`, white space allowed between the two and nothing before or after.

    The pattern of DeepSeek-R1's prompt as ms-swift scores it: further tags inside the outermost pair are not refused."""
    return [float(_R1_FORMAT.match(text_of(c)) is not None) for c in completions]


def soft_overlong(
    completion_ids: list[list[int]], max_completion_length: int, cache_length: int | None = None, floor: float | None = -1.0
) -> list[float]:
    """DAPO's soft length penalty (eq. 13), in tokens: 0 up to max_completion_length - cache_length, then linear to -1 at the maximum.

    `max_completion_length` is the rollout's unless given. `cache_length` defaults to a fifth of it. Longer responses stop at `floor`;
    `floor: null` lets them fall on, as ms-swift does. With cache_length 0 there is no slope: the floor holds above the maximum."""
    cache = max_completion_length // 5 if cache_length is None else cache_length
    if not 0 <= cache <= max_completion_length or (cache == 0 and floor is None):
        low = 1 if floor is None else 0
        raise ValueError(f"soft_overlong: cache_length {cache} must be from {low} to max_completion_length {max_completion_length}")
    return [_length_penalty(len(ids), max_completion_length - cache, cache, floor) for ids in completion_ids]


def _length_penalty(length: int, free: int, cache: int, floor: float | None) -> float:
    if length <= free:
        return 0.0
    slope = (free - length) / cache if cache else float("-inf")
    return slope if floor is None else max(slope, floor)
