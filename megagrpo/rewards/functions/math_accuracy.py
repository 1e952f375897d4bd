"""Rewards for a mathematical answer that equals the gold answer. docs/answers.md says where a response has its answer.

math-verify's time limits use SIGALRM, so these functions run in the main thread of a reward worker only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from megagrpo.rewards.functions.text_rewards import first_answer, text_of
from megagrpo.rewards.math.answers import final_answer
from megagrpo.rewards.math.equality import MAX_ANSWER_LENGTH, equal

_GOLD = (("solution", "answer"),)
# TRL: boxed answers first, then anchored LaTeX ("the answer is $3$"); a number in plain text is no answer.
_STRICT_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
)


def accuracy(
    completions: list[Any],
    solution: list[Any] | None = None,
    answer: list[Any] | None = None,
    prefixes: list[str] | None = None,
    as_trl: bool = False,
) -> list[float | None]:
    r"""Return 1.0 where the answer of a completion equals the gold answer in column `solution` (or else `answer`), else
    0.0; None where the gold is empty.

    `as_trl` scores as TRL's `accuracy_reward` does, with math-verify alone: the first <answer>, or else \boxed{...} or
    anchored LaTeX. It gives None for a gold that math-verify cannot read, such as "(1,2)" outside of $...$.
    """
    golds = _golds(solution, answer)
    texts = [text_of(c) for c in completions]
    if as_trl:
        return [_score_as_trl(text, str(gold)) for text, gold in zip(texts, golds, strict=True)]
    return [
        _score(text, prefix, gold)
        for text, prefix, gold in zip(texts, prefixes or [""] * len(texts), golds, strict=True)
    ]


def reasoning_accuracy(
    completions: list[Any],
    solution: list[Any] | None = None,
    answer: list[Any] | None = None,
    delimiters: tuple[str, ...] = ("</think>",),
    as_trl: bool = False,
) -> list[float | None]:
    """Return the `accuracy` of the text after the last copy of the first delimiter found; 0.0 without a delimiter.

    `as_trl` scores as TRL's `reasoning_accuracy_reward` does.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, _golds(solution, answer), strict=True):
        text = text_of(completion)
        delimiter = next((d for d in delimiters if d in text), None)
        after = "" if delimiter is None else text.rpartition(delimiter)[2]
        if not as_trl:
            rewards.append(_score(after, "", gold))
        else:
            rewards.append(0.0 if delimiter is None else _score_as_trl(after, str(gold), tags=False))
    return rewards


def gold_fault(solution: Any = None, answer: Any = None) -> str | None:
    """Return why no response to a row can be scored, or be right except by repeating long text; None for a good row."""
    name, gold = ("answer", answer) if solution is None else ("solution", solution)
    text = gold_answer(gold)
    if fields := _fields(gold):
        return (
            f"`{name}` is an object, which no response equals: {_short(gold)}; name the field with the answer, as "
            f"data.columns: {{{name}: {name}.{fields[0]}}}"
        )
    if text is None:
        return f"`{name}` has no answer: {_short(gold)}"
    if (len(text.split()) > 12 and "\\begin" not in text) or len(text) > MAX_ANSWER_LENGTH:
        return rf"`{name}` is a text without \boxed{{...}} or `####`, which only the same text equals: {_short(gold)}"
    return None


for _function in (accuracy, reasoning_accuracy):
    vars(_function)["needs_columns"] = _GOLD
    vars(_function)["row_fault"] = gold_fault


@dataclass(eq=False)
class Cosine:
    """Scales `accuracy` by length in tokens: longer right answers earn less, longer wrong ones lose less; None stays.

    The value runs along half a cosine, from the `min_len` value at length 0 to the `max_len` value at `max_len` tokens
    (Yeo et al. 2025, eq. 1), by default the rollout's maximum. Longer responses keep the value at `max_len`. Without
    `clamp` the cosine continues, so twice the length earns the value at length 0. The other defaults are TRL's
    (`get_cosine_scaled_reward`). ms-swift's `cosine` has min_len_value_wrong -0.5, max_len_value_wrong 0.0, no clamp.
    """

    needs_columns = _GOLD
    row_fault = staticmethod(gold_fault)
    max_len: int | None = None
    min_len_value_wrong: float = -1.0
    max_len_value_wrong: float = -0.5
    min_len_value_correct: float = 1.0
    max_len_value_correct: float = 0.5
    clamp: bool = True
    as_trl: bool = False

    def __call__(
        self,
        completions: list[Any],
        completion_ids: list[list[int]],
        max_completion_length: int,
        solution: list[Any] | None = None,
        answer: list[Any] | None = None,
        prefixes: list[str] | None = None,
    ) -> list[float | None]:
        limit = max_completion_length if self.max_len is None else self.max_len
        rights = accuracy(completions, solution, answer, prefixes, self.as_trl)
        return [
            None if right is None else self.value(right >= 1, len(ids), limit)
            for right, ids in zip(rights, completion_ids, strict=True)
        ]

    def value(self, is_right: bool, length: int, max_len: int) -> float:
        """Return the reward of a right or wrong answer of `length` tokens. Raises ValueError for a `max_len` of 0."""
        if max_len <= 0:
            raise ValueError(f"cosine: max_len {max_len} must be above 0")
        first, last = (
            (self.min_len_value_correct, self.max_len_value_correct)
            if is_right
            else (self.min_len_value_wrong, self.max_len_value_wrong)
        )
        progress = min(length / max_len, 1.0) if self.clamp else length / max_len
        return last + (first - last) * (1 + math.cos(progress * math.pi)) / 2


def gold_answer(gold: Any) -> str | None:
    r"""Return the answer in a gold value: a number or text as it is, a list joined, or the part that `final_answer`
    finds in a solution.

    None if it is empty or an object.
    """
    if gold is None or gold != gold or _fields(gold):
        return None
    text = (", ".join(map(str, gold)) if isinstance(gold, (list, tuple)) else str(gold)).strip()
    marked = (
        final_answer(text)
        if any(mark in text for mark in ("</think>", "</answer>", "\\boxed", "\\fbox", "####", "nswer"))
        else text
    )
    return marked or None


def _fields(gold: Any) -> list[str]:
    """Return the names of the fields of an object, of the first in a list, or of one in JSON text; [] for others."""
    if isinstance(gold, str) and gold.lstrip()[:1] in ("{", "["):
        try:
            gold = json.loads(gold)
        except (ValueError, RecursionError):
            return []
    objects = gold if isinstance(gold, (list, tuple)) else [gold]
    return next((list(map(str, value)) for value in objects if isinstance(value, dict)), [])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _golds(solution: list[Any] | None, answer: list[Any] | None) -> list[Any]:
    golds = solution if solution is not None else answer
    assert golds is not None, "`needs_columns` requires one of the two columns"
    return golds


def _score(text: str, prefix: str, gold: Any) -> float | None:
    expected = gold_answer(gold)
    if expected is None:
        return None
    response_answer = final_answer(text, prefix)
    return float(response_answer is not None and equal(expected, response_answer))


def _score_as_trl(text: str, gold: str, tags: bool = True) -> float | None:
    gold_parsed = parse(first_answer(gold) or gold)
    if not gold_parsed:
        return None
    tagged = first_answer(text) if tags else None
    if tagged is None:
        answer_parsed = parse(text, extraction_config=[_STRICT_LATEX], extraction_mode="first_match")
    else:
        answer_parsed = parse(tagged, extraction_mode="first_match")
    return float(verify(gold_parsed, answer_parsed))  # the order matters: gold first
