"""The responses of a step as rows (lines of `completions.jsonl`), and as a table of texts and numbers for trackers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megagrpo.types import ScoredRollout

Row = dict[str, Any]


def completion_rows(step: int, scored: Sequence[ScoredRollout], advantages: Sequence[float]) -> list[Row]:
    """Return one row per response."""
    return [_row(step, s, advantage) for s, advantage in zip(scored, advantages, strict=True)]


def _row(step: int, scored: ScoredRollout, advantage: float) -> Row:
    versions = scored.rollout.later_versions
    return {
        "step": step,
        **response_row(scored),
        "advantage": advantage,
        "weight_version": scored.rollout.weight_version,
        **({"extra": scored.extra} if scored.extra else {}),
        **({"later_versions": versions} if versions else {}),
    }


def response_row(scored: ScoredRollout) -> Row:
    """Return what training and evaluation record of a response."""
    rollout = scored.rollout
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "prompt": rollout.prompt.messages,
        "completion": rollout.text,
        "num_tokens": rollout.length,
        "finish_reason": rollout.finish_reason,
        "reward": scored.reward,
        "rewards": scored.rewards,
        **({} if rollout.stop_string is None else {"stop_string": rollout.stop_string}),
        **({} if rollout.dialogue is None else {"dialogue": rollout.dialogue.record()}),
    }


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and the cells of a table of completions: step, prompt, completion, each reward function,
    columns of `log_extra`, reward, advantage. A cell is text, a number, a boolean or None."""
    rewards, extra = _names(rows, "rewards"), _names(rows, "extra")
    columns = ["step", "prompt", "completion", *(f"rewards/{name}" for name in rewards), *extra, "reward", "advantage"]
    cells = [
        [
            *(row["step"], prompt_text(row["prompt"]), row["completion"]),
            *(row["rewards"].get(name) for name in rewards),
            *(row.get("extra", {}).get(name) for name in extra),
            *(row["reward"], row["advantage"]),
        ]
        for row in rows
    ]
    return columns, [list(map(_cell, line)) for line in cells]


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encodable(text: str) -> str:
    """Return `text` with lone surrogates, which have no UTF-8 bytes, as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _names(rows: Sequence[Row], key: str) -> list[str]:
    """Return the names below `key` in any row, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.get(key, {})))


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text. A single message of the user is its content; other messages begin with their role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def best_and_worst(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of highest and lowest advantage of the first prompt with differing ones, else the first row."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["prompt_id"], []).append(row)
    for group in groups.values():
        ranked = sorted((row for row in group if math.isfinite(row["advantage"])), key=lambda row: row["advantage"])
        if ranked and ranked[0]["advantage"] < ranked[-1]["advantage"]:
            return [ranked[-1], ranked[0]]
    return list(rows[:1])
