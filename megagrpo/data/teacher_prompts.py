"""Which teachers teach a row of the data set, and the prompts that they read (`algorithm.teacher`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from megagrpo.config import RunConfig
from megagrpo.data.prompt_values import as_prompt
from megagrpo.data.tokens.tokenizer import Messages

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def row_teachers(
    config: RunConfig,
    columns: Mapping[str, Any],
    question: Messages,
    render: Callable[[Messages], tuple[int, ...]],
) -> dict[str, tuple[int, ...] | None] | None:
    """Return `Prompt.teachers` of a row with these columns, `task` among them, and this question. Raises ValueError
    with a phrase for a row that lacks a column, or that nothing trains."""
    teachers, longest = config.algorithm.teachers, config.rollout.max_prompt_length
    if not any(teacher.where or teacher.prompt for teacher in teachers.values()):
        return None
    read: dict[str, tuple[int, ...] | None] = {}
    for number, (name, teacher) in enumerate(teachers.items()):
        key = f"algorithm.teacher.{number}"
        values = {column: str(_value(columns, column, f"{key}.where")) for column in teacher.where}
        chosen = {column: one if isinstance(one, list) else [one] for column, one in teacher.where.items()}
        if not all(value in map(str, chosen[column]) for column, value in values.items()):
            read[name] = None
            continue
        read[name] = () if teacher.prompt is None else render(_asked(teacher.prompt, columns, question, key))
        if len(read[name] or ()) > longest:
            reason = f"{key}.prompt has {len(read[name] or ())} tokens, rollout.max_prompt_length is {longest}"
            raise ValueError(f"{reason}; raise it, or shorten the prompt")
    if all(ids is None for ids in read.values()) and not config.all_rewards.functions:
        reason = "no teacher teaches the row, and there are no rewards"
        raise ValueError(f"{reason}; widen a teacher's `where`, or remove the row")
    return read


def _value(columns: Mapping[str, Any], name: str, key: str) -> Any:
    if columns.get(name) is None:
        raise ValueError(f"has no value in column `{name}`, which {key} reads; fill it, or remove the row")
    return columns[name]


def _asked(template: str, columns: Mapping[str, Any], question: Messages, key: str) -> Messages:
    """Return the prompt of a template: one column's, or the question with the filled text as the user's last words."""
    last = None
    if not isinstance(question, str):
        users = [i for i, message in enumerate(question) if message["role"] == "user"]
        last = users[-1] if users else None
    own = question if isinstance(question, str) else "" if last is None else question[last]["content"]
    columns = {**columns, "prompt": own}
    if (single := _FIELD.fullmatch(template)) is not None and single[1] != "prompt":
        value = _value(columns, single[1], f"{key}.prompt")
        try:
            return as_prompt(value)
        except ValueError as error:
            raise ValueError(f"column `{single[1]}` {error}") from None
    text = _FIELD.sub(lambda match: str(_value(columns, match[1], f"{key}.prompt")), template)
    if isinstance(question, str) or last is None:
        return text
    return [*question[:last], question[last] | {"content": text}, *question[last + 1 :]]
