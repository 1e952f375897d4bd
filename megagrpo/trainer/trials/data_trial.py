"""Describes a data set as a run sees it, and warns of prompts that are dropped, repeated, or also evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megagrpo.config import DataSection, DatasetSection, RunConfig, evaluation_sets
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokenizer import Tokenizer, read_chat_template
from megagrpo.types import Prompt

TRAIN = "data.train"


@dataclass(frozen=True)
class SourceTrial:
    """A data set as the run sees it. `lengths` are tokens of every row's prompt; `text` is one rendered prompt, that of
    row `row`.
    `opened` is the end of the prompt that opens a thought for the response, as "<think>", or empty."""

    key: str
    source: str
    prompt_column: str
    columns: list[str]
    lengths: list[int]
    limit: int
    num_overlong: int
    overlong: str
    num_usable: int
    num_repeated: int
    num_trained_on: int
    row: int
    num_tokens: int
    text: str
    opened: str


def sections(config: RunConfig) -> Iterator[tuple[str, DatasetSection, DataSection]]:
    """Yield key, data set and the keys of `data` that apply to it, for training and each held-out set."""
    yield TRAIN, config.data.train, config.data
    for name, section in evaluation_sets(config).items():
        own = {key: getattr(section, key) for key in ("prompt_column", "columns", "extract_hash_answer")}
        yield f"evaluation.sets.{name}" if name else "data.eval", section, config.data.model_copy(update=own)


def describe(
    key: str,
    section: DatasetSection,
    data: DataSection,
    source: PromptSource,
    num_repeated: int,
    num_trained_on: int,
    prompt: Prompt,
    tokenizer: Tokenizer,
    config: RunConfig,
    tools: Sequence[dict[str, Any]],
) -> SourceTrial:
    """Return the description of a data set. `prompt` is the one to show."""
    text = tokenizer.rendered(
        prompt.messages, data.system_prompt, read_chat_template(data.chat_template), tools, prompt.template_kwargs
    )
    return SourceTrial(
        key=key,
        source=section.source,
        prompt_column=data.prompt_column,
        columns=source.columns,
        lengths=source.lengths,
        limit=config.rollout.max_prompt_length,
        num_overlong=source.num_overlong,
        overlong=data.overlong_prompts,
        num_usable=len(source),
        num_repeated=num_repeated,
        num_trained_on=num_trained_on,
        row=prompt.prompt_id,
        num_tokens=len(prompt.token_ids),
        text=str(prompt.messages) if text is None else text,
        opened=prompt.opened,
    )


def repeated_warning(key: str, repeated: Sequence[tuple[int, int]], num_prompts: int) -> list[str]:
    """Return a line when prompts of a data set are equal. `repeated` are (row, first row)."""
    if not repeated:
        return []
    row, first = repeated[0]
    return [
        f"{key}: {len(repeated)} of {num_prompts} prompts repeat an earlier one, first row {row} (as row {first}); "
        f"remove the rows"
    ]


def shared_warning(key: str, shared: Sequence[tuple[int, int]], num_prompts: int) -> list[str]:
    """Return a line when prompts of a held-out set are trained on. `shared` are (row, row of the training set)."""
    if not shared:
        return []
    row, trained = shared[0]
    said = f"{len(shared)} of {num_prompts} prompts are also in {TRAIN}, first row {row} (row {trained} of {TRAIN})"
    return [f"{key}: {said}; remove them from one of the two"]
