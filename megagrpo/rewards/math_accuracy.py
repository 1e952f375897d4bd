"""Mathematical equality by math-verify. Its time limits use SIGALRM, so it runs in the main thread of a reward worker only."""

from __future__ import annotations

from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from megagrpo.rewards.functions import first_answer, text_of

# Boxed answers first, then anchored LaTeX ("the answer is $3$"); a number in plain text is no answer.
_STRICT_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
)


def accuracy(completions: list, solution: list[Any] | None = None, answer: list[Any] | None = None) -> list[float | None]:
    r"""1.0 where math-verify finds the completion equal to column `solution` (or else `answer`), else 0.0; None for an unreadable gold.

    A completion is read from its first <answer>...</answer>, where any expression will do, or else from \boxed{...} or anchored
    LaTeX (TRL's `accuracy_reward`). A gold such as "(1,2)" or "\frac13" is readable inside $...$ only."""
    golds = solution if solution is not None else answer
    return [_score(text_of(c), str(gold)) for c, gold in zip(completions, golds, strict=True)]


accuracy.needs_columns = (("solution", "answer"),)


def _score(text: str, gold: str) -> float | None:
    gold_parsed = parse(first_answer(gold) or gold)
    if not gold_parsed:
        return None
    tagged = first_answer(text)
    if tagged is None:
        answer_parsed = parse(text, extraction_config=[_STRICT_LATEX], extraction_mode="first_match")
    else:
        answer_parsed = parse(tagged, extraction_mode="first_match")
    return float(verify(gold_parsed, answer_parsed))  # the order matters: gold first
