"""Host memory and control plane of a run on 4 ranks (dp 2 x pp 2) with a stub server, beside predictions.

Of the memory, what grows with the samples is compared: the peak of the first step with many samples minus the peak with
few. Seconds are CPU seconds, because four ranks share the cores of a small machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))  # as pytest does

from benchmarks.scaling.fake_samples import GROUP, Engine, prompts
from benchmarks.scaling.step_memory import planned_step_memory
from benchmarks.scaling.table import Point, Series, bytes_text, seconds_text
from megagrpo.config import ParallelSection, RunConfig, load_config
from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.data.packing.sample_packing import PackingRules, build_batch, plan_packing
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.times.step_times import control_seconds
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.parallel.spawn import run_ranks
from megagrpo.platform.process.phases import Phases
from megagrpo.trainer.rollout.collector import Collector
from megagrpo.trainer.rollout.routed_experts_exchange import replayed_batches
from megagrpo.trainer.rollout.token_exchange import trained_samples
from megagrpo.types import SamplingParams
from tests.e2e import stub_runs, world

RANKS, LENGTH, SHORT = 4, 512, 128
PROMPTS = (25, 150)  # of 4 responses each, for the memory
MANY = 500  # for the seconds
LEADERS = (0, 1)  # the other ranks are the second pipeline stage
PARTS = {"read": "draw", "pack": "batches", "write": "finish"}  # part of the control plane -> what does it in the step


ROUTED = (32, 4096)  # responses that each replica samples, and tokens of each, for the routes
ROUTES = RouteShape(tuple(range(48)), 48, 128, 8)  # of Qwen3-30B-A3B


class Compared(NamedTuple):
    """Bytes or seconds that the plan predicts, and that a run took."""

    planned: float
    measured: float


def memory_growth(folder: Path, few: int, many: int) -> dict[str, Compared]:
    """Return who -> bytes that the first step with many prompts needs more than that with few, of a leader and of
    another rank."""
    planned, measured = [], []
    for count in (few, many):
        config, lengths, ranks = _step(folder, LENGTH, count, 1)
        memory = planned_step_memory(config, RANKS, lengths)
        planned.append({who: sum(memory[who].values()) for who in ("leader", "rank")})
        leaders, others = ([rank.peak for i, rank in enumerate(ranks) if (i in LEADERS) == leads] for leads in (1, 0))
        measured.append({"leader": max(leaders), "rank": max(others)})
    return {who: Compared(planned[1][who] - planned[0][who], measured[1][who] - measured[0][who]) for who in planned[0]}


def control_plane(folder: Path, prompts: int) -> dict[str, Compared]:
    """Return part -> seconds of rank 0, which leads a replica and writes, in the second step."""
    config, lengths, ranks = _step(folder, SHORT, prompts, 2)
    planned = control_seconds(config, RANKS, lengths)
    return {part: Compared(planned[part], ranks[0].cpu_seconds[name]) for part, name in PARTS.items()}


def exchanged_routes(samples: int, tokens: int) -> float:
    """Exchange the routes of `samples` responses of each replica, and return CPU seconds of this rank. Collective."""
    layout = init_layout(ParallelSection(pp=2))
    asked = prompts(samples * layout.dp_size)
    share = slice(layout.dp_rank * len(asked) // layout.dp_size, (layout.dp_rank + 1) * len(asked) // layout.dp_size)
    engine = Engine(asked[share], tokens) if layout.is_dp_leader else None
    collector = Collector(layout, engine, engine, Phases())
    collected, _ = collector.collect(asked, GROUP, SamplingParams(1.0, tokens), 0)
    for index, scored in collected.own.items():
        read = len(scored.rollout.prompt.token_ids) + tokens - 1
        known = ROUTES.filler(np.arange(read), len(ROUTES.layers))
        collected.own[index] = replace(scored, rollout=replace(scored.rollout, routes=known))
    rules = PackingRules(max_tokens=32768, at_least=2)
    plan = plan_packing(collected.shapes(np.ones(len(collected)), rules), rules, layout.dp_size)
    batch = build_batch(plan, layout.dp_rank, trained_samples(collected, [plan], layout), rules)
    layout.barrier()
    begun = time.process_time()
    replayed_batches([batch], collected, [plan], layout, ROUTES)
    used = time.process_time() - begun
    layout.close()
    return used


def routes() -> Compared:
    """Return the seconds of a leader for the routes of a step."""
    samples, tokens = ROUTED
    sizes = dict(prompts_per_step=RANKS // 2 * samples // GROUP, num_generations=GROUP, max_completion_length=tokens)
    overrides = [f"rollout.{name}={value}" for name, value in sizes.items()]
    overrides += ["parallel.pp=2", "train.max_tokens_per_micro_batch=32768"]
    config = load_config(world.folder() / "config.yaml", overrides)
    lengths = Lengths(len(prompts(GROUP)[0].token_ids), tokens, tokens)
    planned = control_seconds(config, RANKS, lengths, ROUTES.bytes_per_token)["routes"]
    used = run_ranks(exchanged_routes, RANKS, samples, tokens, timeout=200.0)
    return Compared(planned, max(used[rank] for rank in LEADERS))


def _step(folder: Path, length: int, prompts: int, count: int) -> tuple[RunConfig, Lengths, list[stub_runs.Step]]:
    """Return the config, the lengths and step `count` of each rank."""
    config = load_config(world.folder() / "config.yaml", stub_runs.shape_of_run(folder, length, prompts))
    ranks = [steps[-1] for steps in stub_runs.first_steps(folder, length, prompts=prompts, count=count)]
    mean = ranks[0].metrics["num_tokens"] / (prompts * stub_runs.GROUP)
    return config, Lengths(mean - length, length, length), ranks


def series() -> Iterator[Series]:
    """Yield measured and planned memory of a leader and of another rank, and seconds of a leader."""
    with tempfile.TemporaryDirectory() as folder:
        memory, seconds = memory_growth(Path(folder), *PROMPTS), control_plane(Path(folder), MANY)
    for who, (plan, peak) in memory.items():
        samples = (PROMPTS[1] - PROMPTS[0]) * stub_runs.GROUP
        points = [Point(samples, None, peak), Point(samples, None, plan, computed=True)]
        note = f"planned {bytes_text(plan)}, measured {bytes_text(peak)} more than with {PROMPTS[0] * 4} samples"
        yield Series("plan", f"host memory of a {who}, {LENGTH} tokens a sample", "samples of 4 ranks", points, note)
    for part, (plan, used) in seconds.items():
        samples = MANY * stub_runs.GROUP
        points = [Point(samples, used), Point(samples, plan, computed=True)]
        note = f"planned {seconds_text(plan)}, measured {seconds_text(used)}"
        yield Series("plan", f"{part} of a leader, {SHORT} tokens a sample", "samples of 4 ranks", points, note)
    plan, used = routes()
    samples = ROUTED[0] * RANKS // 2
    points = [Point(samples, used), Point(samples, plan, computed=True)]
    what = f"routes of a leader, {ROUTED[1]:,} tokens of {ROUTES.bytes_per_token} B"
    note = f"planned {seconds_text(plan)}, measured {seconds_text(used)}"
    yield Series("plan", what, "samples of 4 ranks", points, note)
