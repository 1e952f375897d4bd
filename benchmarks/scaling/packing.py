"""The packing of samples into micro-batches, for 32 data-parallel ranks, from five distributions of lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.scaling.table import Point, Series, best_seconds
from megagrpo.data.packing.sample_packing import PackingRules, SampleShapes, plan_packing

BUDGET, RANKS, GROUP, PROMPT = 32768, 32, 8, 128
COUNTS = (1_000, 16_000, 100_000)
DRAWS: dict[str, Callable[[random.Random], float]] = {
    "uniform, 1/2 to 1": lambda rng: rng.uniform(BUDGET / 2, BUDGET),
    "uniform, 0 to 1/4": lambda rng: rng.uniform(1, BUDGET / 4),
    "lognormal, median 1/8": lambda rng: rng.lognormvariate(math.log(BUDGET / 8), 1),
    "lognormal, 15 % at 1": lambda rng: BUDGET if rng.random() < 0.15 else DRAWS["lognormal, median 1/8"](rng),
    "all just above 1/3": lambda rng: BUDGET / 3 + 1,
}


def sample_lengths(kind: str, count: int) -> np.ndarray:
    """Return the lengths [count] of samples in tokens, at most the budget of a micro-batch."""
    rng = random.Random(0)
    drawn = [int(DRAWS[kind](rng)) for _ in range(count)]
    return np.clip(np.array(drawn, dtype=np.int64), PROMPT + 1, BUDGET)


def shapes_of(lengths: np.ndarray) -> SampleShapes:
    """Return samples [N] of these lengths, in groups that share a prompt of `PROMPT` tokens."""
    count = lengths.size
    return SampleShapes(
        lengths=lengths,
        prompt_lengths=np.full(count, PROMPT),
        prompt_keys=np.arange(count) // GROUP,
        num_loss=lengths - PROMPT,
        advantages=np.ones(count),
        masked=np.zeros(count, dtype=bool),
    )


def series() -> Iterator[Series]:
    """Yield the seconds of the plan, with the fill of the micro-batches and the fullest rank over the mean."""
    for kind in DRAWS:
        rules, points, plan = PackingRules(max_tokens=BUDGET, share_prompts=True), [], None
        for count in COUNTS:
            shapes = shapes_of(sample_lengths(kind, count))
            points.append(Point(count, best_seconds(partial(plan_packing, shapes, rules, RANKS))))
            plan = plan_packing(shapes, rules, RANKS)
        assert plan is not None, "there is a largest count"
        computed = int((plan.computed.spans[:, 1] - plan.computed.spans[:, 0]).sum())
        fill = computed / (len(plan.micro_batches) * BUDGET)
        spread = plan.packing["packing/rank_imbalance"].value
        note = f"fill {fill:.4f}, fullest rank over the mean {spread:.5f}, at {COUNTS[-1]:,} samples"
        yield Series("packing", f"plan, lengths {kind}", "samples", points, note)
