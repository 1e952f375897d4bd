"""Decodes the images of prompts before their first use: the start of a run reads only their headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megagrpo.data.images.prompt_images import PromptImages
from megagrpo.data.sources.prompt_order import Origin
from megagrpo.platform.parallel.layout import Layout
from megagrpo.trainer.rollout.collector import NoRollouts
from megagrpo.types import Prompt


def decodable(
    prompts: Sequence[Prompt], origin: Callable[[int], Origin], layout: Layout | None, say: Callable[[str], None]
) -> list[Prompt]:
    """Return the prompts whose images can be decoded, the same on every rank. Collective, unless `layout` is None.

    Each rank decodes the images of its share of the prompts. `say` gets a line about other prompts. `origin` returns
    the data set of a `prompt_id`, whose `BadRows` counts the row, or raises NoRollouts if bad rows are refused.
    """
    if not any(prompt.inputs for prompt in prompts):
        return list(prompts)
    rank, size = (0, 1) if layout is None else (layout.world_rank, layout.world_size)
    faults = [_fault(prompt) if index % size == rank else None for index, prompt in enumerate(prompts)]
    is_bad = torch.tensor([fault is not None for fault in faults], dtype=torch.int64)
    damaged = (is_bad if layout is None else layout.all_reduce(is_bad, "max")).nonzero().flatten().tolist()
    said = []
    for index in damaged:
        fault = faults[index] if layout is None else layout.broadcast_object(faults[index], index % size)
        key, row, bad = origin(prompts[index].prompt_id)
        said.append(f"{key}: row {row}: the prompt {fault}")
        bad.add(NoRollouts(f"{said[-1]}, remove the row, or set data.bad_rows: skip"))
    if said:
        say(f"warning: {len(said)} more rows are bad and skipped (data.bad_rows); the first: {said[0]}")
    return [prompt for index, prompt in enumerate(prompts) if index not in damaged]


def _fault(prompt: Prompt) -> str | None:
    if not isinstance(prompt.inputs, PromptImages):
        return None
    try:
        prompt.inputs.check()
    except ValueError as error:
        return str(error)
    return None
