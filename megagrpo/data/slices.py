"""Which samples each optimizer step of an iteration trains on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from megagrpo.types import TrainSample


def slices(samples: Sequence[TrainSample], count: int, seed: int) -> list[list[TrainSample]]:
    """`count` parts of the samples, each sample in one of them: shuffled by `seed` and cut into lengths that differ by one at most, as TRL
    cuts the rows of a generation batch. Within a part samples keep their order, so that those with one prompt stay neighbours. There
    are fewer parts when there are fewer samples."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=generator).tolist()
    borders = [len(samples) * i // count for i in range(count + 1)]
    parts = [sorted(order[start:stop]) for start, stop in itertools.pairwise(borders)]
    return [[samples[i] for i in part] for part in parts if part]
