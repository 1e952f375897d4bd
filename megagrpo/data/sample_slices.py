"""Assigns samples to the optimizer steps of an iteration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from megagrpo.types import TrainSample


def slices(samples: Sequence[TrainSample], count: int, seed: int) -> list[list[TrainSample]]:
    """Split the samples into `count` parts. They are shuffled by `seed` and cut into lengths that differ by at most
    one, like TRL's generation batches. Within a part samples keep their order, so samples of one prompt stay adjacent.
    Fewer samples than `count` give fewer parts."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=generator).tolist()
    borders = [len(samples) * i // count for i in range(count + 1)]
    parts = [sorted(order[start:stop]) for start, stop in itertools.pairwise(borders)]
    return [[samples[i] for i in part] for part in parts if part]
