"""Describes a data set as a run sees it, and warns of prompts that are dropped, repeated, or also evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megagrpo.config import DataSection, DatasetSection
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokens.tokenizer import Tokenizer, read_chat_template

TRAIN = "data.train"


@dataclass(frozen=True)
class SourceTrial:
    """A data set as the run sees it. `lengths` are tokens of every row's prompt, 0 for a bad row, and `num_bad` counts
    bad rows and lines that are no rows. `text` is one rendered prompt, that of row `row`.
    `opened` is the end of the prompt that opens a thought for the response, as "<think>", or empty."""

    key: str
    source: str
    prompt_column: str
    columns: list[str]
    lengths: list[int]
    limit: int
    num_overlong: int
    overlong: str
    num_bad: int
    num_usable: int
    num_repeated: int
    num_trained_on: int
    row: int
    num_tokens: int
    text: str
    opened: str


@dataclass(frozen=True)
class ConfiguredSet:
    """A data set of the config: its config key, its section, and the keys of `data` that apply to it."""

    key: str
    section: DatasetSection
    data: DataSection

    def describe(
        self,
        source: PromptSource,
        tokenizer: Tokenizer,
        tools: Sequence[dict[str, Any]],
        repeated: int,
        trained_on: int,
    ) -> SourceTrial:
        """Return the description of the set's prompts. `repeated` is the number of prompts that repeat an earlier one,
        `trained_on` of the ones that are also in the training set."""
        (prompt,) = source.peek(1)
        template = read_chat_template(self.data.chat_template)
        text = tokenizer.rendered(prompt.messages, self.data.system_prompt, template, tools, prompt.template_kwargs)
        return SourceTrial(
            key=self.key,
            source=self.section.source,
            prompt_column=self.data.prompt_column,
            columns=source.columns,
            lengths=source.lengths,
            limit=source.max_prompt_length,
            num_overlong=source.num_overlong,
            overlong=self.data.overlong_prompts,
            num_bad=source.bad.count,
            num_usable=len(source),
            num_repeated=repeated,
            num_trained_on=trained_on,
            row=prompt.prompt_id,
            num_tokens=len(prompt.token_ids),
            text=str(prompt.messages) if text is None else text,
            opened=prompt.opened,
        )


def configured_sets(data: DataSection, held_out: Mapping[str, DatasetSection]) -> Iterator[ConfiguredSet]:
    """Yield the training set, then each set of `held_out`, by its name; "" is `data.eval`."""
    yield ConfiguredSet(TRAIN, data.train, data)
    for name, section in held_out.items():
        own = {key: getattr(section, key) for key in ("prompt_column", "columns", "extract_hash_answer")}
        yield ConfiguredSet(f"evaluation.sets.{name}" if name else "data.eval", section, data.model_copy(update=own))


def repeated_warning(key: str, repeated: Sequence[tuple[int, int]], num_prompts: int) -> list[str]:
    """Return a line when prompts of a data set are equal. `repeated` are (row, first row)."""
    if not repeated:
        return []
    row, first = repeated[0]
    return [
        f"{key}: {len(repeated)} of {num_prompts} prompts repeat an earlier one, first row {row} (as row {first}); "
        "remove the rows"
    ]


def shared_warning(key: str, shared: Sequence[tuple[int, int]], num_prompts: int) -> list[str]:
    """Return a line when prompts of a held-out set are trained on. `shared` are (row, row of the training set)."""
    if not shared:
        return []
    row, trained = shared[0]
    count = f"{len(shared)} of {num_prompts} prompts are also in {TRAIN}, first row {row} (row {trained} of {TRAIN})"
    return [f"{key}: {count}; remove them from one of the two"]
