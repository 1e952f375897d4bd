"""Finds a row's own right answer, the gold, and writes it in the forms that responses of models have."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megagrpo.data.sources.text_rows import ANSWERS, names_in, nested
from megagrpo.row_image import content_text
from megagrpo.types import Prompt

# usual names of a right program
PROGRAMS = ("canonical_solution", "solution", "solutions", "code", "completion", "gold_standard_solution")
TESTS = ("tests", "test", "test_list", "test_cases", "input_output", "expected_output")  # columns that judge a program
OUTPUT = "expected_output"
OPENING, CLOSING = "<think>\n", "\n</think>\n\n"
THOUGHT = f"{OPENING}I work it out.{CLOSING}"
FENCE = "```python\nGOLD\n```"
# GOLD stands for the right answer. Rewards differ in the form that they look for.
FORMS = (
    *("GOLD", r"\boxed{GOLD}", "<answer>GOLD</answer>", "#### GOLD", "Answer: GOLD", "The answer is $GOLD$."),
    *(THOUGHT + form for form in (r"\boxed{GOLD}", "<answer>GOLD</answer>", r"<answer>\boxed{GOLD}</answer>")),
    "<reasoning>\nI work it out.\n</reasoning>\n<answer>\nGOLD\n</answer>\n",
    THOUGHT + "Action: answer\nAction Input: GOLD",
)
PROGRAM_FORMS = (FENCE, "GOLD", THOUGHT + FENCE, f"{THOUGHT}<answer>\n{FENCE}\n</answer>")


def in_form(form: str, gold: str, opened: str) -> str:
    """Return the response with this gold. `opened` is the end of a prompt that opens a thought: the response continues
    and closes it."""
    text = form.replace("GOLD", gold)
    if not opened:
        return text
    closing = f"\n</{opened[opened.index('<') + 1 : opened.index('>')]}>\n\n"
    before, is_thought, after = text.partition(CLOSING)
    if not is_thought:
        before, after = THOUGHT.removesuffix(CLOSING), text
    return f"{before.removeprefix(OPENING)}{closing}{after}"


@dataclass(frozen=True)
class GoldColumn:
    """The column that holds the golds of a data set: answers, or programs."""

    name: str
    holds_programs: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of a response with this gold."""
        return PROGRAM_FORMS if self.holds_programs else FORMS

    def gold(self, prompt: Prompt) -> str | None:
        """Return the gold of a row as text; None if it is missing, empty, or neither text nor number."""
        try:
            value = nested(prompt.columns, self.name)
        except KeyError:
            return None
        if not self.holds_programs:
            return _text(value)
        if isinstance(value, str) and value.lstrip().startswith("["):  # APPS and TACO store a list as JSON
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        program = _text(value)
        if program is None or self.name == OUTPUT:
            return program and f"print({program!r})"
        is_body = program.lstrip("\n").startswith((" ", "\t"))  # HumanEval's continues the prompt
        return f"{_question(prompt)}{program}" if is_body else program


def find_golds(prompts: Sequence[Prompt], needs: Sequence[Sequence[str]]) -> GoldColumn | None:
    """Return the column of the golds for a reward function with these required columns; None without any.

    For a function that runs programs: a column with a usual name of a program, else the expected output. For another
    one: a column that it needs or a field of it, with a usual name; else a column that it needs; else any column or
    field with a usual name.
    """
    needed = [name for alternatives in needs for name in alternatives]
    if any(name in TESTS for name in needed):
        columns = [GoldColumn(name, holds_programs=True) for name in (*PROGRAMS, OUTPUT)]
    else:
        fields = [name for name in names_in(prompts[0].columns) if "." in name and name.rpartition(".")[2] in ANSWERS]
        usual = [name for name in needed if name in ANSWERS]
        usual += [field for field in fields if field.partition(".")[0] in needed]  # verl's reward_model.ground_truth
        names = *usual, *needed, *ANSWERS, *fields
        columns = [GoldColumn(name) for name in names]
    return next((column for column in columns if any(column.gold(prompt) for prompt in prompts)), None)


def _text(value: Any) -> str | None:
    """Return a text or a number as text, of a list its first element; None for anything else and for an empty text."""
    if isinstance(value, (list, tuple)):
        value = next((one for one in value if one is not None and one != ""), None)
    if isinstance(value, (str, int, float)) and str(value).strip() and value == value:
        return str(value)
    return None


def _question(prompt: Prompt) -> str:
    return prompt.messages if isinstance(prompt.messages, str) else content_text(prompt.messages[-1]["content"])


def wrong_answers(golds: Sequence[str | None], row: int, count: int) -> list[str]:
    """Return up to `count` different golds of the rows that follow, none equal to the gold of `row`; else a text that
    is no row's gold."""
    own = golds[row]
    distinct: dict[str, str] = {}
    for other in [*golds[row + 1 :], *golds[:row]]:
        if other is not None:
            distinct.setdefault(_plain(other), other)
    distinct.pop(_plain(own or ""), None)
    return [*distinct.values()][:count] or [f"{own}1" if own and own[-1:].isdigit() else "I do not know"]


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()
