"""Draws prompts from a data set in an order that one integer, the cursor, resumes."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import datasets

from megagrpo.config import DataSection, DatasetSection
from megagrpo.data.chat_templates import PROMPT_TAIL, check_kwargs, opened_thought
from megagrpo.data.curriculum import Curriculum
from megagrpo.data.data_sources import load_rows
from megagrpo.data.prompt_values import RenderedPrompts, as_prompt
from megagrpo.data.response_lengths import ResponseLengths
from megagrpo.data.text_rows import ROWS_FOR_NAMES, column_hint, names_in, nested
from megagrpo.data.tokenizer import Messages, Tokenizer, read_chat_template
from megagrpo.types import Prompt

_EVAL_SEED_OFFSET = 10**9  # reasoning-gym seeds row i with seed + i, so nearby seeds share almost all rows
_PASSED_BY_SCORER = {
    *("prompt", "prompts", "completion", "completions", "completion_ids", "finish_reason", "is_truncated"),
    *("prefixes", "max_completion_length", "trainer_state", "log_extra", "log_metric"),
}
_TEMPLATE_KWARGS = "chat_template_kwargs"  # the column with a row's own variables of the chat template


class PromptSource:
    """An endless stream of prompts from one data set, the same on every rank.

    `next(n)` draws prompts. The whole state is `cursor`, the number of positions drawn or skipped since the start, and
    the history of `curriculum`: set both to resume. Every epoch contains each prompt once, in the order of
    blake2b("seed/epoch/prompt_id") with `data.shuffle`, else in the order of the data set. So the order depends only on
    the seed and the epoch, and dropping a prompt does not move the others. Prompts that rest are skipped.

    `section` is `data.train` or a held-out set; `key` is its config key. Held-out prompts of reasoning-gym use a
    different seed. The constructor tokenizes every prompt to get its length (`lengths`, one per row). `num_overlong`
    counts prompts longer than `max_prompt_length` tokens, which are dropped or truncated (`data.overlong_prompts`).
    `warnings` are sentences about prompts that look wrong. `tools` are the JSON schemas that the chat template shows.

    Raises ValueError for a source that is missing or empty, lacks the prompt column, or has only overlong prompts."""

    def __init__(
        self,
        section: DatasetSection,
        data: DataSection,
        tokenizer: Tokenizer,
        max_prompt_length: int,
        seed: int,
        key: str = "data.train",
        tools: Sequence[dict[str, Any]] = (),
    ):
        self._key = key
        self._data, self._tokenizer, self._seed = data, tokenizer, seed
        self._max_prompt_length = max_prompt_length
        self._template, self._tools = read_chat_template(data.chat_template), tools
        self._known_kwargs: set[frozenset[str]] = set()  # names of variables that were checked
        rows_seed = seed + _EVAL_SEED_OFFSET * (key != "data.train")
        self._rows = load_rows(section, self._key, rows_seed, data.prompt_column)
        first_rows = (self._rows[row] for row in range(min(len(self._rows), ROWS_FOR_NAMES)))
        self._check_columns(list(dict.fromkeys(name for row in first_rows for name in names_in(row))))
        self.num_overlong, self.warnings = 0, list[str]()
        self._usable = self._usable_rows()
        self._orders: dict[int, list[int]] = {}  # epoch -> rows in order, for the last epochs in use
        self._peeked: dict[int, Prompt] = {}  # by position, from the cursor on
        self.curriculum = Curriculum(data)
        self.response_lengths = ResponseLengths(len(self._rows))
        self._drawn_in: dict[int, int] = {}  # prompt_id -> epoch, for prompts drawn since the last `learn`
        self.cursor = 0

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        return len(self._usable)

    @property
    def cursor(self) -> int:
        """Number of positions drawn or skipped since the start, over all epochs."""
        return self._cursor

    @cursor.setter
    def cursor(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"prompt cursor {value} is negative; it counts drawn prompts")
        self._cursor = value

    @property
    def columns(self) -> list[str]:
        """Names of the columns that reward functions get, renamed ones included."""
        return list(self._columns(self._rows[0]))

    def next(self, n: int) -> list[Prompt]:
        """Draw the next `n` prompts; they may span two epochs. `prompt_id` is the row in the data set."""
        drawn: list[Prompt] = []
        for position, row, epoch in islice(self._upcoming(), n):
            self._cursor = position + 1
            self._drawn_in[row] = epoch
            drawn.append(self._peeked.pop(position) if position in self._peeked else self._prompt(row, position))
        self._peeked = {position: prompt for position, prompt in self._peeked.items() if position >= self._cursor}
        return drawn

    def peek(self, n: int) -> list[Prompt]:
        """Return the prompts that `next(n)` would draw now, without drawing. A later `learn` may let some rest."""
        upcoming = list(islice(self._upcoming(), n))
        self._peeked |= {
            position: self._prompt(row, position) for position, row, _ in upcoming if position not in self._peeked
        }
        return [self._peeked[position] for position, _, _ in upcoming]

    def learn(self, pass_rates: Mapping[int, float]) -> dict[str, float]:
        """Give the curriculum the pass rates of the prompts drawn since the last call. Returns its metrics."""
        self.curriculum.learn(pass_rates, self._drawn_in)
        self._drawn_in = {}
        return self.curriculum.metrics(self._cursor // len(self))

    def all(self) -> list[Prompt]:
        """Return every prompt once, in the order of the data set. The cursor does not move."""
        return [self._prompt(row) for row in self._usable]

    def sample(self, n: int) -> list[Prompt]:
        """Return up to `n` prompts that are spread evenly over the data set, the first included."""
        count = min(n, len(self))
        return [self._prompt(self._usable[i * len(self) // count]) for i in range(count)]

    def repeated(self) -> list[tuple[int, int]]:
        """Return (row, first row) of each prompt with the tokens of an earlier one."""
        first = self._first_rows()
        return [(row, first[ids]) for row in self._usable if first[ids := self._fingerprints[row]] != row]

    def shared_with(self, prompts: Sequence[Prompt]) -> list[tuple[int, int]]:
        """Return (prompt_id, own row) of each of the `prompts`, of another set, that has the tokens of a row."""
        first = self._first_rows()
        return [(p.prompt_id, first[ids]) for p in prompts if (ids := hash(p.token_ids)) in first]

    def _first_rows(self) -> dict[int, int]:
        return {self._fingerprints[row]: row for row in reversed(self._usable)}

    def _upcoming(self) -> Iterator[tuple[int, int, int]]:
        """Yield (position in the stream, row, epoch) of the prompts from the cursor on that do not rest. Endless,
        because every rest ends."""
        for position in count(self._cursor):
            row, epoch = self._row_at(position)
            if not self.curriculum.rests(row, epoch):
                yield position, row, epoch

    def _row_at(self, position: int) -> tuple[int, int]:
        """Return the row at a position of the stream, and its epoch."""
        epoch, number = divmod(position, len(self))
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1} | {
                epoch: self._epoch_order(epoch)
            }
        return self._orders[epoch][number], epoch

    def _epoch_order(self, epoch: int) -> list[int]:
        if not self._data.shuffle:
            return self._usable
        return sorted(
            self._usable, key=lambda row: blake2b(f"{self._seed}/{epoch}/{row}".encode(), digest_size=16).digest()
        )

    def _check_columns(self, present: list[str]) -> None:
        wanted = [("data.prompt_column", self._data.prompt_column)]
        wanted += [(f"data.columns.{new}", old) for new, old in self._data.columns.items()]
        wanted += [
            ("data.extract_hash_answer", name)
            for name in self._data.extract_hash_answer
            if name not in self._data.columns
        ]
        problems = [
            f"{key}: {self._key} has no column `{name}`; it has {', '.join(present)}{column_hint(name, present)}"
            for key, name in wanted
            if name not in present
        ]
        if problems:
            raise ValueError("\n".join(problems))

    def _usable_rows(self) -> list[int]:
        """Return the rows whose prompts are used, and count overlong prompts."""
        lengths: list[int] = []
        self.lengths, self._fingerprints = lengths, array("q")
        rendered = RenderedPrompts(self._tokenizer, self._template)
        for row in range(len(self._rows)):
            values = self._rows[row]
            prompt = self._question(row, values)
            rendered.see(row, prompt)
            token_ids = self._token_ids(row, prompt, self._template_kwargs(row, values))
            lengths.append(len(token_ids))
            self._fingerprints.append(hash(token_ids[-self._max_prompt_length :]))
        self.warnings += rendered.warnings(self._key, len(lengths))
        overlong = [row for row, length in enumerate(lengths) if length > self._max_prompt_length]
        self.num_overlong = len(overlong)
        if not overlong:
            return list(range(len(lengths)))
        overlong_text = (
            f"{len(overlong)} of {len(lengths)} prompts are longer than rollout.max_prompt_length "
            f"{self._max_prompt_length} (longest: {max(lengths)} tokens, first: row {overlong[0]})"
        )
        if self._data.overlong_prompts == "error":
            raise ValueError(
                f"{self._key}: {overlong_text}; raise the limit, or set data.overlong_prompts to drop or truncate_left"
            )
        action = "dropped" if self._data.overlong_prompts == "drop" else "truncated on the left"
        self.warnings.append(f"{self._key}: {overlong_text}; {action} (data.overlong_prompts)")
        if self._data.overlong_prompts == "truncate_left":
            return list(range(len(lengths)))
        if len(overlong) == len(lengths):
            raise ValueError(f"{self._key}: all prompts are dropped: {overlong_text}; raise the limit")
        return [row for row, length in enumerate(lengths) if length <= self._max_prompt_length]

    def _prompt(self, row: int, position: int | None = None) -> Prompt:
        values = self._rows[row]
        question, own = self._question(row, values), self._template_kwargs(row, values)
        token_ids = self._token_ids(row, question, own)[-self._max_prompt_length :]
        last = {} if isinstance(question, str) else question[-1]
        prefill = str(last["content"]) if last.get("role") == "assistant" else ""
        opened = opened_thought(self._tokenizer.decode(token_ids[-PROMPT_TAIL:], special=True), prefill)
        return Prompt(
            row,
            token_ids,
            question,
            self._columns(values),
            place=position,
            template_kwargs=own,
            opened=opened,
            expected_length=self.response_lengths.expected(row),
        )

    def _columns(self, values: dict[str, Any]) -> dict[str, Any]:
        columns = {name: value for name, value in values.items() if name not in _PASSED_BY_SCORER}
        columns |= {new: _field(values, old) for new, old in self._data.columns.items()}
        return columns | {name: hash_answer(_field(columns, name)) for name in self._data.extract_hash_answer}

    def _question(self, row: int, values: dict[str, Any]) -> Messages:
        """The prompt of a row. ValueError for a value that is no prompt."""
        column = self._data.prompt_column
        try:
            return as_prompt(nested(values, column), isinstance(self._rows, datasets.Dataset))
        except KeyError:
            raise ValueError(
                f"{self._key}: row {row} has no `{column}` (data.prompt_column); add it, or remove the row"
            ) from None
        except ValueError as error:
            raise ValueError(f"{self._key}: row {row}: column `{column}` {error}") from None

    def _token_ids(self, row: int, prompt: Messages, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        token_ids = self._tokenizer.render(prompt, self._data.system_prompt, self._template, self._tools, kwargs)
        if not token_ids:
            raise ValueError(f"{self._key}: row {row}: the prompt has no tokens: {prompt!r}; remove the row")
        return token_ids

    def _template_kwargs(self, row: int, values: dict[str, Any]) -> dict[str, Any]:
        """The row's own variables of the chat template. ValueError for variables that the template does not use."""
        value, said = values.get(_TEMPLATE_KWARGS), f"{self._key}: row {row}: column `{_TEMPLATE_KWARGS}`"
        # a mapping as JSON text, which keeps the types of files with one schema for all rows
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if value is not None and not isinstance(value, dict):
            raise ValueError(
                f"{said} must be a mapping of variables of the chat template (got {value!r:.100}); correct or remove it"
            )
        kwargs = {name: v for name, v in (value or {}).items() if v is not None}  # Arrow adds None for absent keys
        if (names := frozenset(kwargs)) not in self._known_kwargs:
            check_kwargs(sorted(names), self._tokenizer.template(self._template, self._tools), said)
            self._known_kwargs.add(names)
        return kwargs


def hash_answer(text: Any) -> str | None:
    """Return the stripped text after the first `####` of a GSM8K answer, up to any next `####`; None without one."""
    pieces = str(text).split("####")
    return pieces[1].strip() if len(pieces) > 1 else None


def _field(row: dict[str, Any], name: str) -> Any:
    try:
        return nested(row, name)
    except KeyError:
        return None
