"""Rewards that need only the standard library. Each returns a float per completion, or None where it cannot score."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from typing import Any

from megagrpo.rewards.math.answers import number_part
from megagrpo.rewards.math.numbers import is_plain, last_number, only_number

_END_OF_THOUGHT = re.compile(r"</think>\s*<answer>")
_THINK = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)
_REACT = re.compile(r"<think>.*?</think>\s*Action:.*?Action Input:", re.DOTALL)


def text_of(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion, which is a string or a list with one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def whole_texts(completions: list[Any], prefixes: list[str] | None) -> list[str]:
    """Return each completion's text after its prefix: the tag that the chat template opened, such as "<think>\\n"."""
    return [prefix + text_of(c) for prefix, c in zip(prefixes or [""] * len(completions), completions, strict=True)]


def encodable(text: str) -> str:
    """Return the text with each lone surrogate, which UTF-8 cannot encode, replaced by a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def first_answer(text: str) -> str | None:
    """Return the content of the first <answer>...</answer>, stripped; None without one."""
    _, opened, rest = text.partition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return content.strip() if opened and closed else None


def exact_number(completions: list[Any], answer: list[Any], prefixes: list[str] | None = None) -> list[float | None]:
    """Return 1.0 if the answer's last number equals the number of column `answer` ("72", 72, "... #### 72"), else 0.0.

    docs/rewards.md states what a number is. Returns None when `answer` has no number or several.
    """
    golds = [_number(str(value), only_number) for value in answer]
    rows = zip(completions, prefixes or [""] * len(completions), golds, strict=True)
    return [
        None if gold is None else float(_number(text_of(c), last_number, prefix) == gold) for c, prefix, gold in rows
    ]


def _number(text: str, read: Callable[[str], Decimal | None], prefix: str = "") -> Decimal | None:
    part = number_part(text, prefix)
    return None if part is None else read(part)


def _number_fault(answer: Any = None) -> str | None:
    """Return why a row is unscorable: its gold is not one number, or has words or units, which no reward compares."""
    part = number_part(str(answer))
    if part is not None and is_plain(part):
        return None
    gold = repr(answer)
    return f"`answer` is no plain number: {gold if len(gold) <= 80 else gold[:77] + '...'}"


vars(exact_number)["row_fault"] = _number_fault


def format(completions: list[Any], prefixes: list[str] | None = None) -> list[float]:
    """Return 1.0 for exactly `<think>...</think><answer>...</answer>`; white space is allowed only between the two.

    This is the pattern of DeepSeek-R1's prompt as ms-swift scores it: further tags inside the outermost pair are
    accepted. A `<think>` that the chat template has opened (`prefixes`) is part of the response.
    """
    return [float(_is_r1_format(text)) for text in whole_texts(completions, prefixes)]


def _is_r1_format(text: str) -> bool:
    """Match `<think>.*?</think>\\s*<answer>.*?</answer>` from end to end, in linear time for any text."""
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    middle = _END_OF_THOUGHT.search(text, len("<think>"))
    return middle is not None and middle.end() <= len(text) - len("</answer>")


def think_format(completions: list[Any], prefixes: list[str] | None = None) -> list[float]:
    """Return 1.0 for a completion that begins with its only `<think>`, closed by `</think>`; any text may follow (TRL's
    `think_format_reward`). A `<think>` that the chat template has opened (`prefixes`) is part of the response."""
    return [float(_THINK.match(text) is not None) for text in whole_texts(completions, prefixes)]


def react_format(completions: list[Any], prefixes: list[str] | None = None) -> list[float]:
    """Return 1.0 for `<think>...</think>` followed by `Action: ... Action Input: ...` (ms-swift's `react_format`). A
    `<think>` that the chat template has opened (`prefixes`) is part of the response."""
    return [float(_REACT.match(text) is not None) for text in whole_texts(completions, prefixes)]


def soft_overlong(
    completion_ids: list[list[int]],
    max_completion_length: int,
    cache_length: int | None = None,
    floor: float | None = -1.0,
) -> list[float]:
    """Return DAPO's soft length penalty (eq. 13): 0 up to max_completion_length - cache_length tokens, then down to -1.

    `max_completion_length` defaults to the rollout's, `cache_length` to a fifth of it. Longer responses get `floor`;
    with `floor: null` the penalty keeps falling, as in ms-swift. With cache_length 0 there is no slope: above the
    maximum the penalty is `floor`.
    """
    cache = max_completion_length // 5 if cache_length is None else cache_length
    if not 0 <= cache <= max_completion_length or (cache == 0 and floor is None):
        low = 1 if floor is None else 0
        raise ValueError(
            f"soft_overlong: cache_length {cache} must be from {low} to max_completion_length {max_completion_length}"
        )
    return [_length_penalty(len(ids), max_completion_length - cache, cache, floor) for ids in completion_ids]


def _length_penalty(length: int, free: int, cache: int, floor: float | None) -> float:
    if length <= free:
        return 0.0
    slope = (free - length) / cache if cache else float("-inf")
    return slope if floor is None else max(slope, floor)


def repetition(completions: list[Any], n_grams: int = 3, max_penalty: float = -1.0) -> list[float]:
    """Return the share of repeated word n-grams times `max_penalty`: 0 without repetition (ms-swift's `repetition`).

    Words are separated by white space and lowercased. A text of fewer than `n_grams` words scores 0.
    """
    _check_repetition("repetition", "n_grams", n_grams, max_penalty)
    return [max_penalty * repeated_share(text_of(c).lower().split(), n_grams) for c in completions]


def token_repetition(completion_ids: list[list[int]], ngram_size: int = 3, max_penalty: float = -1.0) -> list[float]:
    """Return the share of repeated token n-grams times `max_penalty` (TRL's `get_repetition_penalty_reward`)."""
    _check_repetition("token_repetition", "ngram_size", ngram_size, max_penalty)
    return [max_penalty * repeated_share(ids, ngram_size) for ids in completion_ids]


def repeated_share(sequence: Sequence[Hashable], n: int) -> float:
    """Return 1 - distinct n-grams / all n-grams; 0 for a sequence shorter than `n`."""
    total = len(sequence) - n + 1
    if total <= 0:
        return 0.0
    return 1 - len(set(zip(*(sequence[i:] for i in range(n)), strict=False))) / total


def _check_repetition(name: str, option: str, n: int, max_penalty: float) -> None:
    if n < 1:
        raise ValueError(f"{name}: {option} {n} must be 1 or more")
    if max_penalty > 0:
        raise ValueError(f"{name}: max_penalty {max_penalty} must be 0 or less: it is the reward of endless repetition")
