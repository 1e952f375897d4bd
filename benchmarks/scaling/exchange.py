"""The way of a step's rollouts from the ranks that sample them to the ranks that train on them.

Real processes with gloo, two pipeline stages a replica, a fixed number of samples for each replica. The bytes are those
that the fullest rank sends and receives over host groups, and its memory beyond the rollouts that it sampled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.scaling.fake_samples import GROUP, Engine, prompts
from benchmarks.scaling.table import Point, Series, bytes_text, peak_bytes, reset_peak
from megagrpo.config import ParallelSection
from megagrpo.data.packing.sample_packing import PackingRules, plan_packing
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.parallel.spawn import run_ranks
from megagrpo.platform.process.phases import Phases
from megagrpo.trainer.rollout.collector import Collector
from megagrpo.trainer.rollout.token_exchange import trained_samples
from megagrpo.types import SamplingParams
from tests.message_log import Message, record

STAGES, WORLDS = 2, (2, 4, 8)
SAMPLES, TOKENS = 128, 4096  # of each replica, and of each response
LARGE = ((512, 16, 8_192, 16_384), (16_384, 32, 100_000, 24_576))  # ranks, ranks a replica, samples, tokens a response


class Cost(NamedTuple):
    """Seconds, bytes moved and peak memory of one rank, for the facts of all samples and for the tokens."""

    facts_seconds: float
    facts_bytes: int
    tokens_seconds: float
    tokens_bytes: int
    memory: int


def moved(messages: list[Message]) -> int:
    """Return the bytes that this rank sent and received."""
    return sum(message.sent + message.received for message in messages)


def exchange(samples: int, tokens: int) -> Cost:
    """Collect and exchange `samples` responses on this rank. Collective."""
    layout = init_layout(ParallelSection(pp=STAGES))
    asked = prompts(samples * layout.dp_size)
    share = slice(layout.dp_rank * len(asked) // layout.dp_size, (layout.dp_rank + 1) * len(asked) // layout.dp_size)
    engine = Engine(asked[share], tokens) if layout.is_dp_leader else None
    collector = Collector(layout, engine, engine, Phases())
    one_each = asked[:: len(asked) // layout.dp_size]  # opens connections, and names the columns
    collector.collect(one_each, GROUP, SamplingParams(1.0, tokens), 0)
    layout.barrier()
    before, begun = reset_peak(), time.perf_counter()
    with record(layout) as facts:
        collected, _ = collector.collect(asked, GROUP, SamplingParams(1.0, tokens), 0)
    between = time.perf_counter()
    with record(layout) as rows:
        rules = PackingRules(max_tokens=32768, share_prompts=True)
        plan = plan_packing(collected.shapes(np.ones(len(collected)), rules), rules, layout.dp_size)
        mine = trained_samples(collected, [plan], layout)
    ended, peak = time.perf_counter(), peak_bytes() - before
    assert mine, "each replica trains on a share of the samples"
    layout.close()
    return Cost(between - begun, moved(facts), ended - between, moved(rows), peak)


def series() -> Iterator[Series]:
    """Yield the exchange of facts and of tokens against ranks: measured, then computed for large worlds."""
    facts = Series("exchange", f"facts, {SAMPLES} samples a replica", "ranks")
    tokens = Series("exchange", f"tokens, {SAMPLES} x {TOKENS:,} a replica", "ranks")
    memory = Series("exchange", "memory beyond the sampled rollouts", "ranks")
    for world in WORLDS:
        costs = run_ranks(exchange, world, SAMPLES, TOKENS, timeout=200.0)
        fullest = Cost(*map(max, zip(*costs, strict=True)))
        facts.points.append(Point(world, fullest.facts_seconds, fullest.facts_bytes))
        tokens.points.append(Point(world, fullest.tokens_seconds, fullest.tokens_bytes))
        memory.points.append(Point(world, None, fullest.memory))
    per_sample = fullest.facts_bytes / (SAMPLES * WORLDS[-1] / STAGES)
    per_token = fullest.tokens_bytes / (SAMPLES * TOKENS)
    held = fullest.memory / (SAMPLES * TOKENS)
    for ranks, of_replica, samples, length in LARGE:
        own = samples * of_replica / ranks * length
        rate = fullest.tokens_seconds / fullest.tokens_bytes  # on two cores that all ranks share
        facts.points.append(Point(ranks, None, per_sample * samples, computed=True))
        tokens.points.append(Point(ranks, per_token * own * rate, per_token * own, computed=True))
        memory.points.append(Point(ranks, None, held * own, computed=True))
        tokens.note += f"{ranks:,} ranks: {samples:,} samples of {length:,} tokens, {ranks // of_replica} replicas. "
    facts.note = f"{per_sample:.0f} B for each sample of the step"
    tokens.note += f"{per_token:.1f} B for each token that a replica samples, sent and received; at most 24"
    memory.note = f"{held:.0f} B a token that the rank trains, {bytes_text(fullest.memory)} at {WORLDS[-1]} ranks"
    yield from (facts, tokens, memory)
