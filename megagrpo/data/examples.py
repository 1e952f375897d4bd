"""Reads examples: rows of a data set with the responses that a run learns from, and the tokens that its loss counts."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from megagrpo.config import DataSection, DatasetSection, RunConfig
from megagrpo.data.prompt_values import as_prompt
from megagrpo.data.sources.data_identity import DataIdentity
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.sources.text_rows import ROWS_FOR_NAMES, JsonRows, column_hint, names_in, nested
from megagrpo.data.tokens.assistant_mask import Masked, masked_chat, masked_text
from megagrpo.data.tokens.chat_templates import PLAIN_TEXT
from megagrpo.data.tokens.row_settings import row_mapping
from megagrpo.data.tokens.tokenizer import Messages, Tokenizer, as_messages, read_chat_template
from megagrpo.types import Prompt

Row = dict[str, Any]
SHOWN_REFUSED, MOST_REFUSED = 5, 100  # bad rows in an error, and looked for


@dataclass(frozen=True)
class Answer:
    """A response of a row: its tokens [n] after the prompt, and whether the loss counts each."""

    token_ids: tuple[int, ...]
    written: tuple[bool, ...]
    text: str
    value: float  # what the method's `Layout` says about it


@dataclass(frozen=True)
class Example(Prompt):
    """A row with its responses. `token_ids` are the tokens that come before each of them."""

    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Told:
    """One conversation of a row: a prompt with a response, of which the loss counts the messages from `first` on."""

    prompt: Messages
    response: Messages
    first: int
    value: float = 1.0


@dataclass(frozen=True)
class Layout:
    """What the rows of a method hold: sets of columns, one of which they have, and a row's conversations."""

    columns: tuple[tuple[str, ...], ...]
    read: Callable[[Callable[[str], Any]], list[Told]]
    scores: bool = False  # the loss counts one position: the last token of the conversation
    mismatched: bool = False  # each prompt also gets the response of another row, with value 0


def demonstrations(get: Callable[[str], Any]) -> list[Told]:
    """Return the conversation of a row with `messages`, or with a prompt and its `response` or `completion`."""
    if (messages := get("messages")) is not None:
        if isinstance(messages, str):
            raise ValueError("column `messages` must be chat messages; name a text column `response`, with a prompt")
        return [Told(messages, [], 0)]
    response = get("response")
    response = get("completion") if response is None else response
    return [Told(_given(get, "prompt"), _written(response, "response"), 0)]


def _given(get: Callable[[str], Any], name: str) -> Messages:
    """Return what a row has in a column. Raises ValueError for a row without it."""
    if (value := get(name)) is None:
        raise ValueError(f"column `{name}` must be a string or chat messages (got None)")
    return value


def _written(response: Messages | None, name: str) -> Messages:
    """Return a response. Raises ValueError for one without text."""
    texts = [response] if isinstance(response, str) else [m["content"] or m.get("tool_calls") for m in response or ()]
    if not any(text.strip() if isinstance(text, str) else text for text in texts):
        raise ValueError(f"column `{name}` is an empty response; write one, or remove the row")
    assert response is not None, "an absent response has no text"
    return response


DEMONSTRATIONS = Layout((("messages",), ("prompt", "response"), ("prompt", "completion")), demonstrations)


def pairs(get: Callable[[str], Any]) -> list[Told]:
    """Return the conversations of a row with a `chosen` and a `rejected` response to its prompt; whole conversations
    may hold the prompt themselves."""
    both = [_written(get(name), name) for name in ("chosen", "rejected")]
    chosen, rejected = both
    if isinstance(chosen, list) and isinstance(rejected, list) and chosen[0]["role"] != "assistant":
        equal = [one == other for one, other in zip(chosen, rejected, strict=False)]
        count = equal.index(False) if False in equal else len(equal)
        while count and chosen[count - 1]["role"] == "assistant":
            count -= 1  # its answer is a part of the response
        prompt: Messages = chosen[:count]
        both = [messages[count:] for messages in (chosen, rejected)]
    else:
        prompt = _given(get, "prompt")
    return [Told(prompt, response, 0, value) for response, value in zip(both, (1.0, -1.0), strict=True)]


PREFERENCES = Layout((("prompt", "chosen", "rejected"), ("chosen", "rejected")), pairs)


def scored_pairs(get: Callable[[str], Any]) -> list[Told]:
    """Return the pairs of a row, with its `margin` as the value of the chosen response."""
    margin = get("margin")
    known = margin is None or (isinstance(margin, int | float) and not isinstance(margin, bool))
    if not known or not 0 <= (margin or 0) < math.inf:
        raise ValueError(f"column `margin` must be a number of at least 0 (got {margin!r:.80})")
    return [replace(told, value=value) for told, value in zip(pairs(get), (margin or 0.0, 0.0), strict=True)]


SCORED_PAIRS = Layout(PREFERENCES.columns, scored_pairs, scores=True)


def labeled(get: Callable[[str], Any]) -> list[Told]:
    """Return the conversation of a row, whose value is +-1 by its `label`."""
    if not isinstance(label := get("label"), bool):
        raise ValueError(f"column `label` must be true or false (got {label!r:.80})")
    return [replace(told, value=1.0 if label else -1.0) for told in demonstrations(get)]


LABELED = Layout((("prompt", "response", "label"), ("prompt", "completion", "label")), labeled, mismatched=True)


class ExampleSource(PromptOrder):
    """The examples of one data set, drawn in the order of a `PromptOrder`.

    `section` is `data.train` or a held-out set, `key` its config key. The constructor tokenizes every row to check it:
    `lengths` has the tokens of the longest conversation of each row. Conversations above `limit` tokens are dropped,
    truncated on the left or refused (`data.overlong_prompts`), and counted. Raises ValueError like `PromptSource`.
    """

    def __init__(
        self, section: DatasetSection, data: DataSection, key: str, layout: Layout, tokenizer: Tokenizer, *run: int
    ):
        from megagrpo.data.sources.data_sources import load_rows  # imported late: `datasets` and pandas are slow

        longest, seed = run
        self.limit = longest - layout.scores
        self.last_tokens = set[int]()  # of the conversations
        super().__init__((), data, seed)
        self._key, self._layout, self._tokenizer = key, layout, tokenizer
        self._template = read_chat_template(data.chat_template)
        self._rows = load_rows(section, key, seed, data.prompt_column, self.bad)
        self.identity = DataIdentity(section) if key == "data.train" else None
        self._check_columns()
        self.rows = self._usable_rows()

    def prompt(self, row: int, position: int | None = None) -> Prompt:
        """Return the example of a row; `position` is its index in the stream of rows."""
        told, masked = self._conversations(row, self._rows[row])
        if self._layout.mismatched:
            told, masked = self._with_mismatch(row, told, masked)
        shared = _shared([ids for ids, _ in masked], [mask.index(True) for _, mask in masked])
        cut = max(0, max(len(ids) for ids, _ in masked) - self.limit)
        if cut >= shared:  # of one conversation: its first tokens have no token before them
            masked, shared, cut = [(ids[cut:], [False, *mask[cut + 1 :]]) for ids, mask in masked], 1, 0
        parts = [(ids[shared:], mask[shared:]) for ids, mask in masked]
        if self._layout.scores:  # at a last token after those of the conversation, whose prediction is never read
            parts = [([*ids, ids[-1]], [*(False for _ in ids), True]) for ids, _ in parts]
        answers = [_answer(*part, one) for part, one in zip(parts, told, strict=True)]
        question = told[0].prompt
        return Example(row, tuple(masked[0][0][cut:shared]), question, {}, position=position, answers=tuple(answers))

    def _with_mismatch(self, row: int, told: list[Told], masked: list[Masked]) -> tuple[list[Told], list[Masked]]:
        """Add the row's prompt with the response of the next usable row, cut to the limit."""
        following = self.rows[(bisect_left(self.rows, row) + 1) % len(self.rows)]
        other = self._layout.read(partial(self._messages, self._rows[following]))[0]
        mixed = Told(told[0].prompt, other.response, 0, 0.0)
        ids, mask = self._masked(mixed, *self._settings(self._rows[row]))
        longest = max(self.limit, len(masked[0][0]))
        return [*told, mixed], [*masked, (ids[:longest], mask[:longest])]

    def _check_columns(self) -> None:
        """Raise ValueError if the rows lack the columns of the method."""
        firsts = [self._rows[row] for row in range(min(len(self._rows), ROWS_FOR_NAMES))]
        present = list(dict.fromkeys(name for row in firsts for name in names_in(row)))
        sets = [[self._column(name) for name in columns] for columns in self._layout.columns]
        if any(set(columns) <= set(present) for columns in sets):
            return
        hints = [column_hint(name, present) for columns in sets for name in columns if name not in present]
        wanted = " or ".join(" + ".join(f"`{name}`" for name in columns) for columns in sets)
        raise ValueError(
            f"{self._key}: the rows need {wanted}, but have {', '.join(present)}{next(filter(None, hints), '')}; "
            "rename columns in the file, or in data.columns"
        )

    def _column(self, name: str) -> str:
        """Return the column that has what a method calls `name`."""
        return self._data.prompt_column if name == "prompt" else self._data.columns.get(name, name)

    def _conversations(self, row: int, values: Row) -> tuple[list[Told], list[Masked]]:
        """Return the conversations of a row, and the tokens and mask of each. Raises ValueError for a bad row."""
        try:
            told = self._layout.read(partial(self._messages, values))
            settings = self._settings(values)
            masked = [self._masked(one, *settings) for one in told]
            if len(masked) == 2 and masked[0] == masked[1]:
                raise ValueError("columns `chosen` and `rejected` are equal, so nothing is preferred; remove the row")
        except ValueError as error:
            raise ValueError(f"{self._key}: row {row}: {error}") from None
        return told, masked

    def _messages(self, values: Row, name: str) -> Any:
        """Return what a row has in a column of the method, or None."""
        column = self._column(name)
        try:
            value = nested(values, column)
        except KeyError:
            return None
        try:
            if value is None or name in ("margin", "label"):
                return value
            return as_prompt(value, not isinstance(self._rows, list | JsonRows))
        except ValueError as error:
            raise ValueError(f"column `{column}` {error}") from None

    def _settings(self, values: Row) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the row's tools, and its variables of the chat template."""
        tools = values.get("tools") or []
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError as error:
            raise ValueError(f"column `tools` is no JSON: {error}") from None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("column `tools` must be a list of JSON schemas")
        kwargs = row_mapping(values.get("chat_template_kwargs"), "variables of the chat template", "the column")
        return tools, kwargs

    def _masked(self, told: Told, tools: list[dict[str, Any]], kwargs: dict[str, Any]) -> Masked:
        tokenizer, plain = self._tokenizer, isinstance(told.prompt, str) and isinstance(told.response, str)
        has_template = self._template != PLAIN_TEXT and tokenizer.template(self._template, tools) is not None
        if self._layout.scores and not has_template:
            raise ValueError("data.chat_template: a reward model needs a chat template; set Jinja text or a file")
        if plain and not has_template and self._data.system_prompt is None:
            return masked_text(tokenizer, str(told.prompt), str(told.response))
        before = as_messages(told.prompt, self._data.system_prompt)
        answer = told.response
        after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        first = len(before) if after else told.first
        _check_answers([*before, *after])
        return masked_chat(tokenizer, [*before, *after], first, self._template, tools, kwargs)

    def _usable_rows(self) -> Sequence[int]:
        """Return the rows that are used, and count overlong ones. Raises ValueError that names bad rows."""
        lines, self.lengths, kept, known = self.bad.count, list[int](), list[int](), set[float]()
        refused = list[str]()
        for row in range(len(self._rows)):
            values, length = dict[str, Any](), 0
            try:
                values = self._rows[row]
                told, masked = self._conversations(row, values)
                known.update(one.value for one in told)
                self.last_tokens.update(ids[-1] for ids, _ in masked)
                length = max(len(ids) for ids, _ in masked)
                if length <= self.limit or self._fits_cut(row, masked, length - self.limit):
                    kept.append(row)
            except ValueError as error:
                where, said = f"{self._key}: row {row}", str(error)
                if self.bad.skips:
                    self.bad.add(error, where)
                elif len(refused) < MOST_REFUSED:
                    refused.append(said if where in said else f"{where}: {said}")
                else:
                    break
            if self.identity is not None:
                self.identity.add(values)
            self.lengths.append(length)
        if refused:
            more = f"{len(refused)}{' or more' if len(refused) == MOST_REFUSED else ''} rows are bad"
            counted = [f"{self._key}: {more}; correct them, or leave them out with data.bad_rows: skip"]
            raise ValueError("\n".join(refused[:SHOWN_REFUSED] + counted[: len(refused) > 1]))
        self._count_overlong(kept)
        self.warnings += self.bad.warnings(self._key, len(self.lengths) + lines)
        if not kept:
            raise ValueError("\n".join([f"{self._key}: no row is usable; correct the rows", *self.warnings]))
        if self._layout.mismatched and self._key == "data.train" and len(known) == 1:
            label = str(known == {1.0}).lower()
            raise ValueError(
                f"{self._key}: `label` is {label} in all rows, so nothing is preferred; add the other kind"
            )
        return range(len(self.lengths)) if len(kept) == len(self.lengths) else kept

    def _count_overlong(self, kept: Sequence[int]) -> None:
        """Add a warning with the number of rows above the limit, of which `kept` are used."""
        overlong = [row for row, length in enumerate(self.lengths) if length > self.limit]
        if overlong:
            action = "truncated on the left" if self._data.overlong_prompts == "truncate_left" else "dropped"
            dropped = len(set(overlong) - set(kept))
            self.warnings.append(
                f"{self._key}: {len(overlong)} of {len(self.lengths)} rows are longer than rollout.max_prompt_length + "
                f"max_completion_length {self.limit} (longest: {max(self.lengths)} tokens, first: row {overlong[0]}); "
                f"{action}{f', {dropped} of them dropped' if 0 < dropped < len(overlong) else ''} "
                "(data.overlong_prompts)"
            )

    def _fits_cut(self, row: int, masked: Sequence[Masked], cut: int) -> bool:
        """Whether an overlong row is used without its first `cut` tokens. Raises ValueError if it is refused."""
        mode = self._data.overlong_prompts
        if mode == "error":
            raise ValueError(
                f"{self._key}: row {row} has {cut + self.limit} tokens, above rollout.max_prompt_length + "
                f"max_completion_length {self.limit}; raise a limit, or set data.overlong_prompts to drop or "
                "truncate_left"
            )
        if len(masked) == 1 and not self._layout.mismatched:
            return mode == "truncate_left" and any(masked[0][1][cut + 1 :])
        shared = _shared([ids for ids, _ in masked], [mask.index(True) for _, mask in masked])
        return mode == "truncate_left" and cut < shared


def _check_answers(messages: list[dict[str, Any]]) -> None:
    """Raise ValueError for a tool's message that answers no message of the assistant, or an unknown call."""
    known = set[str]()
    for number, (before, message) in enumerate(pairwise([{"role": ""}, *messages])):
        if message["role"] == "assistant":
            known = {str(call.get("id")) for call in message.get("tool_calls") or ()}
        elif message["role"] == "tool":
            if before["role"] not in ("assistant", "tool"):
                raise ValueError(f"message {number} is a tool's, but follows no message of the assistant; reorder them")
            if (call := message.get("tool_call_id")) is not None and known and str(call) not in known:
                raise ValueError(f"message {number} answers the call {call!r:.40}, which the assistant did not make")


def _shared(conversations: Sequence[Sequence[int]], firsts: Sequence[int]) -> int:
    """Return the number of tokens with which all conversations begin, before the first token of any response."""
    prompts = [ids[:first] for ids, first in zip(conversations, firsts, strict=True)]
    for place, tokens in enumerate(zip(*prompts, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(firsts)


def _answer(ids: Sequence[int], written: Sequence[bool], told: Told) -> Answer:
    """Return the response up to its last token in the loss."""
    stop = len(written) - [*reversed(written)].index(True)
    text = told.response or told.prompt
    text = text if isinstance(text, str) else str(text[-1]["content"])
    return Answer(tuple(ids[:stop]), tuple(written[:stop]), text, told.value)


def example_reader(config: RunConfig, tokenizer: Tokenizer, layout: Layout) -> Callable[..., ExampleSource]:
    """Return a function that reads the data set of a section, with the settings of `data`, and its config key."""
    run = config.max_model_len, config.run.seed
    return lambda section, data, key: ExampleSource(section, data, key, layout, tokenizer, *run)
