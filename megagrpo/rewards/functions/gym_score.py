"""Scores of reasoning-gym: each task family scores its own answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from megagrpo.rewards.functions.text_rewards import text_of
from megagrpo.rewards.math.numbers import last_number, number_text

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # raised in cellpylib, which reasoning-gym imports
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import extract_answer


def reasoning_gym(
    completions: list[Any], answer: list[Any], metadata: list[dict[str, Any]], question: list[str], extract: str = "tag"
) -> list[float]:
    """Return the task family's score, 0 to 1, of the answer in each completion.

    `extract`: "tag" takes the last <answer>...</answer>, or the whole completion without one; "number" takes the last
    number. Many families give partial credit to an answer that contains the gold one, so "number" is the stricter
    choice for arithmetic. Raises ValueError for another `extract`.
    """
    if extract not in ("tag", "number"):
        raise ValueError(f"reasoning_gym: extract {extract!r} must be 'tag' or 'number'")
    rows = zip(completions, answer, metadata, question, strict=True)
    return [_score(_extracted(text_of(c), extract), {"question": q, "answer": a, "metadata": m}) for c, a, m, q in rows]


def _extracted(text: str, extract: str) -> str | None:
    if extract == "number":
        number = last_number(text)
        return None if number is None else number_text(number)
    tagged = extract_answer(text)
    return text.strip() if tagged is None else tagged


def _score(answer: str | None, entry: dict[str, Any]) -> float:
    if answer is None:  # some families raise for None
        return 0.0
    return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry=entry))


@cache
def _scorer(family: str) -> Callable[..., float]:
    dataset_class, config_class = DATASETS[family]
    return dataset_class(config=config_class()).score_answer
