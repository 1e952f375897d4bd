"""Decodes the images of prompts before their first use: the start of a run reads only their headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megagrpo.data.images.prompt_images import PromptImages
from megagrpo.data.sources.bad_rows import BadRows
from megagrpo.platform.parallel.layout import Layout
from megagrpo.trainer.rollout.collector import NoRollouts
from megagrpo.types import Prompt


def decodable(
    key: str, prompts: Sequence[Prompt], bad: BadRows, layout: Layout | None, say: Callable[[str], None]
) -> list[Prompt]:
    """Return the prompts whose images can be decoded, the same on every rank. Collective, unless `layout` is None.

    Each rank decodes the images of its share of the prompts. Other prompts are counted in `bad`, and `say` gets a line
    about them; NoRollouts is raised if bad rows are refused. `key` is the config key of the data set.
    """
    if not any(prompt.inputs for prompt in prompts):
        return list(prompts)
    rank, size = (0, 1) if layout is None else (layout.world_rank, layout.world_size)
    faults = [_fault(prompt) if index % size == rank else None for index, prompt in enumerate(prompts)]
    is_bad = torch.tensor([fault is not None for fault in faults], dtype=torch.int64)
    damaged = (is_bad if layout is None else layout.all_reduce(is_bad, "max")).nonzero().flatten().tolist()
    if damaged:
        first = damaged[0]
        fault = faults[first] if layout is None else layout.broadcast_object(faults[first], first % size)
        said = f"{key}: row {prompts[first].prompt_id}: the prompt {fault}"
        for _ in damaged:
            bad.add(NoRollouts(f"{said}, remove the row, or set data.bad_rows: skip"))
        say(f"warning: {key}: {len(damaged)} more rows are bad and skipped (data.bad_rows); the first: {said}")
    return [prompt for index, prompt in enumerate(prompts) if index not in damaged]


def _fault(prompt: Prompt) -> str | None:
    if not isinstance(prompt.inputs, PromptImages):
        return None
    try:
        prompt.inputs.check()
    except ValueError as error:
        return str(error)
    return None
