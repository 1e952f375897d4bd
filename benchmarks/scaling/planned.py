"""Host memory and control plane of a run on 4 ranks (dp 2 x pp 2) with a stub server, beside what `megagrpo plan`
predicts.

Of the memory, what grows with the samples is compared: the peak of the first step with many samples minus the peak with
few. Seconds are CPU seconds, because four ranks share the cores of a small machine.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))  # as pytest does

from benchmarks.scaling.table import Point, Series, bytes_text, seconds_text
from megagrpo.config import RunConfig, load_config
from megagrpo.proof.plan.control_plane import control_seconds
from megagrpo.proof.plan.step_memory import planned_step_memory
from megagrpo.proof.plan.workload import Lengths
from tests.e2e import stub_runs, world

RANKS, LENGTH, SHORT = 4, 512, 128
PROMPTS = (25, 150)  # of 4 responses each, for the memory
MANY = 500  # for the seconds
LEADERS = (0, 1)  # the other ranks are the second pipeline stage
PARTS = {"read": "draw", "pack": "batches", "write": "finish"}  # part of the control plane -> what does it in the step


class Compared(NamedTuple):
    """Bytes or seconds that the plan predicts, and that a run took."""

    planned: float
    measured: float


def memory_growth(folder: Path, few: int, many: int) -> dict[str, Compared]:
    """Return who -> bytes that the first step with many prompts needs more than that with few, of a leader and of
    another rank."""
    planned, measured = [], []
    for prompts in (few, many):
        config, lengths, ranks = _step(folder, LENGTH, prompts, 1)
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
