"""Rows of `completions.jsonl`, from rollouts that are all at hand."""

from collections.abc import Sequence
from typing import Any

from megagrpo.records.rows.completions import completion_row
from megagrpo.records.rows.jsonl_file import encoded
from megagrpo.types import ScoredRollout


def completion_rows(step: int, scored: Sequence[ScoredRollout], advantages: Sequence[float]) -> list[dict[str, Any]]:
    return [completion_row(step, *pair) for pair in zip(scored, advantages, strict=True)]


def completion_parts(step: int, scored: Sequence[ScoredRollout], advantages: Sequence[float]) -> list[bytes]:
    """The lines as a writer gets them, a part for each."""
    return [encoded([row]) for row in completion_rows(step, scored, advantages)]
