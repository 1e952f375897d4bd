"""Defines the section `data`: the sources of prompts, and how prompts are rendered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from megagrpo.config.sections.section import PositiveInt, Section, Share

# Arguments of the renderer itself, which `data.chat_template_kwargs` cannot set.
RENDERER_ARGUMENTS = """
    conversation conversations messages tools chat_template add_generation_prompt continue_final_message tokenize
    padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
""".split()


def _two_pass_rates(value: object) -> object:
    if not isinstance(value, list) or len(value) not in (0, 2):
        raise ValueError("must be the lowest and the highest pass rate, such as [0.1, 0.9], or [] for no curriculum")
    return value


class DatasetSection(Section):
    source: str
    """A jsonl, json, csv, tsv, parquet or arrow file, a folder, a hub name, or `reasoning_gym:FAMILY`."""
    split: str = "train"
    """Split of a hub data set or a folder; slices such as `train[:100]` work."""
    subset: str | None = None
    """Configuration name of a hub data set (gsm8k: `main`)."""
    size: PositiveInt | None = None
    """Rows to generate (reasoning-gym) or to keep."""
    options: dict[str, Any] = {}
    """Options of a reasoning-gym family, `seed` included."""


class DataSection(Section):
    train: DatasetSection = DatasetSection(source="")
    """Prompts to learn from; required without `tasks`."""
    eval: DatasetSection | None = None
    """Held-out prompts; no evaluation when empty."""
    prompt_column: str = "prompt"
    """Column with the question: a string or a list of chat messages."""
    columns: dict[str, str] = {}
    """Renames columns for the reward functions: `{solution: answer}` passes column `answer` as `solution`."""
    extract_hash_answer: list[str] = []
    """Columns, renamed ones included, that the reward functions get from after `####` on, which is GSM8K's final
    answer; None without `####`."""
    images: bool = False
    """Prompts have images: in the column `image` or `images`, or in parts of chat messages. docs/vision.md."""
    system_prompt: str | None = None
    """System message put before string prompts."""
    chat_template: str | None = None
    """Jinja text, or a file holding it (`megagrpo:templates/hermes_tools.jinja` is shipped), used in place of the
    tokenizer's; `none` feeds the prompt as plain text after one BOS, as rendered prompts need."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking: false` (Qwen3) or `reasoning_effort: low` (gpt-oss),
    for every prompt. A row's column `chat_template_kwargs` (a mapping) adds to them and overrides them."""
    sampling_column: str | None = None
    """Column of `data.train` with a row's own sampling parameters: a mapping, also as JSON text. The trainer's
    log-probs use them; evaluation does not. docs/sampling.md lists them."""
    source: str | None = None
    """A class that chooses the next prompts, as `path/file.py:Class` or `package.module:Class`: docs/data_source.md."""
    source_args: dict[str, Any] = {}
    """Keyword arguments of the constructor of `data.source`."""
    shuffle: bool = True
    """Shuffle each epoch in an order that depends only on the seed and the epoch."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "drop"
    """What happens to prompts above `rollout.max_prompt_length`. error: they are bad rows (`data.bad_rows`); drop: they
    are never drawn, the next prompt takes their place (ms-swift's `delete`); truncate_left: they keep their last
    tokens."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What happens to a row that the run cannot use: a line that is no row, no prompt, an image that cannot be read,
    invalid settings of the row, no value in a column that rewards need. refuse: the run ends before it starts; skip:
    the row is left out, and the number of bad rows is printed."""
    curriculum: Annotated[list[Share], BeforeValidator(_two_pass_rates)] = []
    """Lowest and highest pass rate of prompts that do not rest, such as `[0.1, 0.9]`, over a prompt's responses when it
    was last drawn. A prompt outside rests for some epochs, so others are drawn more often. `[]`: no prompt rests."""
    curriculum_rest: PositiveInt = 4
    """Epochs that a prompt rests for."""
    curriculum_pass_reward: float = 1.0
    """A response passes when its reward is at least this."""
