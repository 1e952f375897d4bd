"""Reads the prompts of a data set: renders, tokenizes and checks them, and draws them in a `PromptOrder`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megagrpo.config import DataSection, DatasetSection, RunConfig
from megagrpo.data.images.prompt_images import PromptImages, image_columns, undecoded
from megagrpo.data.prompt_values import RenderedPrompts, as_prompt
from megagrpo.data.sources.data_identity import DataIdentity
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.sources.text_rows import ROWS_FOR_NAMES, JsonRows, column_hint, names_in, nested
from megagrpo.data.teacher_prompts import row_teachers
from megagrpo.data.tokens.chat_templates import PROMPT_TAIL, check_kwargs, opened_thought
from megagrpo.data.tokens.row_settings import RowReader, row_mapping
from megagrpo.data.tokens.tokenizer import Messages, Tokenizer, as_messages, read_chat_template
from megagrpo.platform.process.terminal import warn
from megagrpo.row_image import RowImage
from megagrpo.types import Prompt

_EVAL_SEED_OFFSET = 10**9  # reasoning-gym seeds row i with seed + i, so nearby seeds share almost all rows
_PASSED_BY_SCORER = {
    *("prompt", "prompts", "completion", "completions", "completion_ids", "finish_reason", "is_truncated"),
    *("prefixes", "max_completion_length", "trainer_state", "log_extra", "log_metric"),
}
_TEMPLATE_KWARGS = "chat_template_kwargs"  # the column with a row's own variables of the chat template


class PromptSource(PromptOrder):
    """The prompts of one data set, with their tokens and columns.

    `section` is `data.train` or a held-out set; `key` is its config key. Held-out prompts of reasoning-gym use a
    different seed. The constructor tokenizes every prompt to get its length (`lengths`, one per row). `num_overlong`
    counts prompts longer than `max_prompt_length` tokens, which are dropped or truncated (`data.overlong_prompts`).
    `bad` counts bad rows, whose length is 0 (`data.bad_rows`).
    `warnings` are sentences about prompts that look wrong. `tools` are the JSON schemas that the chat template shows.
    `row_reader` reads the column `data.sampling_column`, which has no effect without it, and knows the columns that
    rewards need. Where it `tries` constraints,
    on one rank of a run, the source also computes the `identity` of its rows.

    Raises ValueError for a source that is missing or empty, lacks the prompt column, or has no usable row, and for a
    bad row that is refused."""

    def __init__(
        self,
        section: DatasetSection,
        data: DataSection,
        tokenizer: Tokenizer,
        max_prompt_length: int,
        seed: int,
        key: str = "data.train",
        tools: Sequence[dict[str, Any]] = (),
        row_reader: RowReader | None = None,
    ):
        from megagrpo.data.sources.data_sources import load_rows  # imported late: `datasets` and pandas are slow

        super().__init__((), data, seed)
        self._key, self._tokenizer = key, tokenizer
        self.max_prompt_length, self._row_reader = max_prompt_length, row_reader
        self._above, _, name = key.rpartition("data.")  # of a task's keys
        self._trains = name == "train"
        self._images = tokenizer.images.beside(section.source) if data.images and tokenizer.images else None
        self._template, self._tools = read_chat_template(data.chat_template), tools
        self._known_kwargs: set[frozenset[str]] = set()  # names of variables that were checked
        rows_seed = seed + _EVAL_SEED_OFFSET * (not self._trains)
        rows = load_rows(section, self._key, rows_seed, data.prompt_column, self.bad)
        self._rows = rows if self._images is None else undecoded(rows)
        first_rows = (self._rows[row] for row in range(min(len(self._rows), ROWS_FOR_NAMES)))
        self._check_columns(list(dict.fromkeys(name for row in first_rows for name in names_in(row))))
        self.num_overlong = 0
        is_first = row_reader is None or row_reader.tries
        self.identity = DataIdentity(section) if is_first and self._trains else None
        self.rows = self._usable_rows()

    @property
    def columns(self) -> list[str]:
        """Names of the columns that reward functions get, renamed ones included."""
        values = self._rows[self.rows[0]]
        return list(self._columns(values, self._question(self.rows[0], values)[1]))

    def sample(self, n: int) -> list[Prompt]:
        """Return up to `n` prompts that are spread evenly over the data set, the first included."""
        count = min(n, len(self))
        return [self.prompt(self.rows[i * len(self) // count]) for i in range(count)]

    def repeated(self) -> list[tuple[int, int]]:
        """Return (row, first row) of each prompt with the tokens and images of an earlier one."""
        found = []
        for rows in self._by_fingerprint().values():
            first: dict[Any, int] = {}
            for row in rows if len(rows) > 1 else ():
                if (earlier := first.setdefault(self._images_key(row), row)) != row:
                    found.append((row, earlier))
        return sorted(found)

    def shared_with(self, prompts: Sequence[Prompt]) -> list[tuple[int, int]]:
        """Return (prompt_id, own row) of each of the `prompts`, of another set, that has the tokens and images of a
        row."""
        found, own = [], self._by_fingerprint()
        for p in prompts:
            rows = own.get(_fingerprint(p.token_ids, p.inputs), ())
            key = p.inputs.key if rows and isinstance(p.inputs, PromptImages) else None
            if (row := next((row for row in rows if self._images_key(row) == key), None)) is not None:
                found.append((p.prompt_id, row))
        return found

    def _by_fingerprint(self) -> dict[int, list[int]]:
        """The rows with each fingerprint, in order."""
        found: dict[int, list[int]] = {}
        for row in self.rows:
            found.setdefault(self._fingerprints[row], []).append(row)
        return found

    def _images_key(self, row: int) -> Any:
        """What is equal for rows with equal images. It reads files, so only rows with equal fingerprints need it."""
        inputs = {} if self._images is None else self.prompt(row).inputs
        return inputs.key if isinstance(inputs, PromptImages) else None

    def _check_columns(self, present: list[str]) -> None:
        wanted = [("prompt_column", self._data.prompt_column)]
        if self._data.sampling_column and self._trains:
            wanted.append(("sampling_column", self._data.sampling_column))
        wanted += [(f"columns.{new}", old) for new, old in self._data.columns.items()]
        wanted += [
            ("extract_hash_answer", name) for name in self._data.extract_hash_answer if name not in self._data.columns
        ]
        problems = [
            f"{self._above}data.{key}: {self._key} has no column `{name}`; "
            f"it has {', '.join(present)}{column_hint(name, present)}"
            for key, name in wanted
            if name not in present
        ]
        if problems:
            raise ValueError("\n".join(problems))

    def _usable_rows(self) -> Sequence[int]:
        """Return the rows whose prompts are used, and count overlong prompts and bad rows."""
        lines = self.bad.count  # that are no rows
        self.lengths, self._fingerprints = list[int](), array("q")
        rendered = RenderedPrompts(self._tokenizer, self._template)
        for row in range(len(self._rows)):
            token_ids: tuple[int, ...] = ()
            fingerprint, values = 0, dict[str, Any]()
            try:
                values = self._rows[row]
                prompt, images = self._question(row, values)
                token_ids, inputs = self._token_ids(row, prompt, images, self._template_kwargs(row, values))
                fingerprint = _fingerprint(token_ids[-self.max_prompt_length :], inputs)
                self._sampling(row, values)
                self._check_needs(row, values, images)
                self._teachers(row, values, prompt)
                rendered.see(row, prompt)
            except ValueError as error:
                self.bad.add(error, f"{self._key}: row {row}")
                token_ids = ()
            if self.identity is not None:
                self.identity.add(values)
            self.lengths.append(len(token_ids))
            self._fingerprints.append(fingerprint)
        total = len(self.lengths)
        self.warnings += rendered.warnings(self._key, total)
        limit, dropped = self.max_prompt_length, self._overlong()
        rows = [row for row, length in enumerate(self.lengths) if length and not (dropped and length > limit)]
        self.warnings += self.bad.warnings(self._key, total + lines)
        if not rows:
            raise ValueError("\n".join([f"{self._key}: no row is usable; correct the rows", *self.warnings]))
        return range(total) if len(rows) == total else rows

    def _overlong(self) -> bool:
        """Count overlong prompts, and return whether they are left out."""
        lengths, mode = self.lengths, self._data.overlong_prompts
        overlong = [row for row, length in enumerate(lengths) if length > self.max_prompt_length]
        self.num_overlong = len(overlong)
        if not overlong:
            return False
        overlong_text = (
            f"{len(overlong)} of {len(lengths)} prompts are longer than rollout.max_prompt_length "
            f"{self.max_prompt_length} (longest: {max(lengths)} tokens, first: row {overlong[0]})"
        )
        if mode == "error":
            fix = "raise the limit, or set data.overlong_prompts to drop or truncate_left"
            for _ in overlong:
                self.bad.add(ValueError(f"{self._key}: {overlong_text}; {fix}"))
        elif mode == "drop" and len(overlong) == len(lengths):
            raise ValueError(f"{self._key}: all prompts are dropped: {overlong_text}; raise the limit")
        else:
            action = "dropped" if mode == "drop" else "truncated on the left"
            self.warnings.append(f"{self._key}: {overlong_text}; {action} (data.overlong_prompts)")
        return mode != "truncate_left"

    def row(self, number: int) -> dict[str, Any]:
        """Return the columns of a row of the data set, as they were read."""
        return self._rows[number]

    def accepts(self, values: dict[str, Any], number: int) -> bool:
        """Whether the prompt of a row that a data source returns is used: valid, with images that can be decoded, and
        short enough or truncated. Raises ValueError for a bad row unless bad rows are skipped;
        `data.overlong_prompts: error` makes a long prompt a bad row."""
        try:
            question, images = self._question(number, values)
            ids, inputs = self._token_ids(number, question, images, self._template_kwargs(number, values))
            tokens = len(ids)
            self._sampling(number, values)
            self._check_needs(number, dict.fromkeys(self._rows[0]) | values, images)
            self._teachers(number, values, question)
            if isinstance(inputs, PromptImages):
                self._decode(number, inputs)
            if tokens > self.max_prompt_length and self._data.overlong_prompts == "error":
                raise ValueError(f"the prompt of a new row has {tokens} tokens; rollout.max_prompt_length is less")
        except ValueError as error:
            self.bad.add(error)
            warn(f"warning: bad row {self.bad.count} of {self._key} is skipped (data.bad_rows): {error}")
            return False
        return tokens <= self.max_prompt_length or self._data.overlong_prompts == "truncate_left"

    def _decode(self, row: int, images: PromptImages) -> None:
        try:
            images.check()
        except ValueError as error:
            raise ValueError(f"{self._key}: row {row}: the prompt {error}") from None

    def prompt(self, row: int, position: int | None = None) -> Prompt:
        """Return the prompt of a row; `position` is its index in the stream of prompts."""
        return self.new_prompt(self._rows[row], row, position)

    def new_prompt(self, values: dict[str, Any], prompt_id: int, position: int | None = None) -> Prompt:
        """Return the prompt of a row with these columns, whose number is `prompt_id`."""
        row = prompt_id
        (question, images), own = self._question(row, values), self._template_kwargs(row, values)
        token_ids, inputs = self._token_ids(row, question, images, own)
        token_ids = token_ids[-self.max_prompt_length :]
        last = {} if isinstance(question, str) else question[-1]
        prefill = str(last["content"]) if last.get("role") == "assistant" else ""
        opened = opened_thought(self._tokenizer.decode(token_ids[-PROMPT_TAIL:], special=True), prefill)
        return Prompt(
            row,
            token_ids,
            question,
            self._columns(values, images),
            position=position,
            template_kwargs=own,
            opened=opened,
            inputs=inputs,
            sampling=self._sampling(row, values),
            expected_length=self.response_lengths.expected(row),
            teachers=self._teachers(row, values, question),
        )

    def _columns(self, values: dict[str, Any], images: Sequence[RowImage]) -> dict[str, Any]:
        if images:
            values = values | image_columns(values, images)
        columns = {name: value for name, value in values.items() if name not in _PASSED_BY_SCORER}
        columns |= {new: _field(values, old) for new, old in self._data.columns.items()}
        return columns | {name: hash_answer(_field(columns, name)) for name in self._data.extract_hash_answer}

    def _check_needs(self, row: int, values: dict[str, Any], images: Sequence[RowImage]) -> None:
        """Raise ValueError for a row that lacks a value which rewards need."""
        if self._row_reader is not None and self._row_reader.needs:
            try:
                self._row_reader.check_columns(self._columns(values, images))
            except ValueError as error:
                raise ValueError(f"{self._key}: row {row}: {error}") from None

    def _question(self, row: int, values: dict[str, Any]) -> tuple[Messages, list[RowImage]]:
        """The prompt of a row, and its images. ValueError for a value that is no prompt."""
        column = self._data.prompt_column
        try:
            from_arrow = not isinstance(self._rows, list | JsonRows)
            prompt = as_prompt(nested(values, column), from_arrow, self._images is not None)
            if self._images is None:
                return prompt, []
            messages, found = self._images.question(as_messages(prompt, self._data.system_prompt), values)
        except KeyError:
            raise ValueError(
                f"{self._key}: row {row} has no `{column}` (data.prompt_column); add it, or remove the row"
            ) from None
        except ValueError as error:
            raise ValueError(f"{self._key}: row {row}: column `{column}` {error}") from None
        try:
            return messages if found else prompt, self._images.images(found)
        except ValueError as error:
            raise ValueError(f"{self._key}: row {row}: the prompt {error}") from None

    def _token_ids(
        self, row: int, prompt: Messages, images: Sequence[RowImage], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """The tokens of a prompt, and its `inputs`. ValueError for a prompt without tokens."""
        reader = self._images if images else None
        expand = str if reader is None else reader.expanded
        token_ids = self._tokenizer.render(
            prompt, self._data.system_prompt, self._template, self._tools, kwargs, expand
        )
        if not token_ids:
            raise ValueError(f"{self._key}: row {row}: the prompt has no tokens: {prompt!r}; remove the row")
        if reader is None:
            return token_ids, {}
        try:
            return reader.placed(token_ids, images)
        except ValueError as error:
            raise ValueError(f"{self._key}: row {row}: the prompt {error}") from None

    def _template_kwargs(self, row: int, values: dict[str, Any]) -> dict[str, Any]:
        """The row's own variables of the chat template. ValueError for variables that the template does not use."""
        said = f"{self._key}: row {row}: column `{_TEMPLATE_KWARGS}`"
        kwargs = row_mapping(values.get(_TEMPLATE_KWARGS), "variables of the chat template", said)
        if (names := frozenset(kwargs)) not in self._known_kwargs:
            check_kwargs(sorted(names), self._tokenizer.template(self._template, self._tools), said)
            self._known_kwargs.add(names)
        return kwargs

    def _sampling(self, row: int, values: dict[str, Any]) -> dict[str, Any]:
        """The row's own sampling parameters. ValueError for parameters that no request can have."""
        column, reader = self._data.sampling_column, self._row_reader
        if reader is None or not self._trains or not (reader.sampling or column):
            return {}
        own = reader.sampling
        said = f"{self._above}sampling"
        if column is not None:
            said = f"{self._key}: row {row}: column `{column}` (data.sampling_column)"
            own = own | row_mapping(_field(values, column), "sampling parameters", said)
        return reader.read(own, said)

    def _teachers(
        self, row: int, values: dict[str, Any], question: Messages
    ) -> dict[str, tuple[int, ...] | None] | None:
        """`Prompt.teachers` of a row. ValueError for a row that teachers cannot teach."""
        if self._row_reader is None or not self._trains or not self._row_reader.config.algorithm.teacher:
            return None
        columns = self._columns(values, []) | ({"task": task} if (task := self._above[len("tasks.") : -1]) else {})
        own, tokenizer = (self._data.system_prompt, self._template, self._tools), self._tokenizer
        kwargs = self._template_kwargs(row, values)
        try:
            return row_teachers(
                self._row_reader.config, columns, question, lambda asked: tokenizer.render(asked, *own, kwargs)
            )
        except ValueError as error:
            raise ValueError(f"{self._key}: row {row}: {error}") from None


def prompt_reader(
    config: RunConfig,
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] = (),
    vocab_size: int | None = None,
    first: bool = True,
    needs: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType({}),
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[DatasetSection, DataSection, str], PromptSource]:
    """Return a function that reads the data set of a section, with the settings of `data`, and its config key.
    `vocab_size`, `needs` and `sampling` are `RowReader`'s. Only the `first` rank tries constraints and identifies the
    rows."""
    longest, seed = config.rollout.max_prompt_length, config.run.seed
    row_reader = RowReader(config, tokenizer, vocab_size, first, needs, dict(sampling))
    return lambda section, data, key: PromptSource(section, data, tokenizer, longest, seed, key, tools, row_reader)


def _fingerprint(token_ids: tuple[int, ...], inputs: Mapping[str, Any]) -> int:
    """Return a number that is equal for equal tokens and lengths of images' files, in this process."""
    return hash((token_ids, inputs.lengths)) if isinstance(inputs, PromptImages) else hash(token_ids)


def hash_answer(text: Any) -> str | None:
    """Return the stripped text after the first `####` of a GSM8K answer, up to any next `####`; None without one."""
    pieces = str(text).split("####")
    return pieces[1].strip() if len(pieces) > 1 else None


def _field(row: dict[str, Any], name: str) -> Any:
    try:
        return nested(row, name)
    except KeyError:
        return None
