"""Mathematical equality by math-verify. Its time limits use SIGALRM, so it runs in the main thread of a reward worker only."""

from __future__ import annotations

from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from megagrpo.rewards.functions.text import cosine_value, first_answer, text_of

# Boxed answers first, then anchored LaTeX ("the answer is $3$"); a number in plain text is no answer.
_STRICT_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
)
_GOLD = (("solution", "answer"),)


def accuracy(completions: list[Any], solution: list[Any] | None = None, answer: list[Any] | None = None) -> list[float | None]:
    r"""Return 1.0 when math-verify finds the completion equal to column `solution` (or else `answer`), else 0.0; None for an unparsable
    gold answer.

    The answer is parsed from the first <answer>...</answer>, where any expression is accepted, or else from \boxed{...} or anchored LaTeX
    (TRL's `accuracy_reward`). A gold answer such as "(1,2)" or "\frac13" can only be parsed inside $...$.
    """
    golds = _golds(solution, answer)
    return [_score(text_of(c), str(gold)) for c, gold in zip(completions, golds, strict=True)]


def reasoning_accuracy(
    completions: list[Any], solution: list[Any] | None = None, answer: list[Any] | None = None, delimiters: tuple[str, ...] = ("</think>",)
) -> list[float | None]:
    """Return the `accuracy` of the text after the last occurrence of the first delimiter that occurs; 0.0 without any: the reasoning did
    not end.

    TRL's `reasoning_accuracy_reward`. Only boxed answers and anchored LaTeX count.
    """
    golds = _golds(solution, answer)
    rewards: list[float | None] = []
    for completion, gold in zip(completions, golds, strict=True):
        text = text_of(completion)
        delimiter = next((d for d in delimiters if d in text), None)
        rewards.append(0.0 if delimiter is None else _score(text.rpartition(delimiter)[2], str(gold), tags=False))
    return rewards


def cosine(
    completions: list[Any],
    completion_ids: list[list[int]],
    max_completion_length: int,
    solution: list[Any] | None = None,
    answer: list[Any] | None = None,
    max_len: int | None = None,
    min_len_value_wrong: float = -1.0,
    max_len_value_wrong: float = -0.5,
    min_len_value_correct: float = 1.0,
    max_len_value_correct: float = 0.5,
    clamp: bool = True,
) -> list[float | None]:
    """Return `accuracy` scaled by length in tokens: longer right answers earn less, longer wrong answers lose less; None as in `accuracy`.

    `max_len` defaults to the rollout's maximum. The other defaults are TRL's (`get_cosine_scaled_reward`). ms-swift's `cosine` has
    min_len_value_wrong -0.5, max_len_value_wrong 0.0 and no clamp above `max_len`.
    """
    limit = max_completion_length if max_len is None else max_len
    values = (min_len_value_wrong, max_len_value_wrong, min_len_value_correct, max_len_value_correct)
    rights = accuracy(completions, solution, answer)
    return [
        None if right is None else cosine_value(right >= 1, len(ids), limit, *values, clamp=clamp)
        for right, ids in zip(rights, completion_ids, strict=True)
    ]


for _function in (accuracy, reasoning_accuracy, cosine):
    vars(_function)["needs_columns"] = _GOLD


def _golds(solution: list[Any] | None, answer: list[Any] | None) -> list[Any]:
    golds = solution if solution is not None else answer
    assert golds is not None, "`needs_columns` requires one of the two columns"
    return golds


def _score(text: str, gold: str, tags: bool = True) -> float | None:
    gold_parsed = parse(first_answer(gold) or gold)
    if not gold_parsed:
        return None
    tagged = first_answer(text) if tags else None
    if tagged is None:
        answer_parsed = parse(text, extraction_config=[_STRICT_LATEX], extraction_mode="first_match")
    else:
        answer_parsed = parse(tagged, extraction_mode="first_match")
    return float(verify(gold_parsed, answer_parsed))  # the order matters: gold first
