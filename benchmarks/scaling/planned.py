"""Host memory of a run on 4 ranks (dp 2 x pp 2) with a stub server, beside the memory that `megagrpo plan` predicts.

What grows with the samples is compared: the peak of the first step with many samples minus the peak with few.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))  # as pytest does

from benchmarks.scaling.table import Point, Series, bytes_text
from megagrpo.config import load_config
from megagrpo.proof.plan.step_memory import planned_step_memory
from megagrpo.proof.plan.workload import Lengths
from tests.e2e import stub_runs, world

RANKS, LENGTH = 4, 512
PROMPTS = (25, 150)  # of 4 responses each
LEADERS = (0, 1)  # the other ranks are the second pipeline stage


def growth(folder: Path, few: int, many: int) -> dict[str, tuple[float, float, float]]:
    """Return who -> bytes planned, bytes measured, and seconds of the larger step, of a leader and another rank."""
    planned, measured = [], []
    seconds = 0.0
    for prompts in (few, many):
        config = load_config(world.folder() / "config.yaml", stub_runs.shape_of_run(folder, LENGTH, prompts))
        ranks = [steps[0] for steps in stub_runs.first_steps(folder, LENGTH, prompts=prompts, count=1)]
        mean = ranks[0].metrics["num_tokens"] / (prompts * stub_runs.GROUP)
        memory = planned_step_memory(config, RANKS, Lengths(mean - LENGTH, LENGTH, LENGTH))
        planned.append({who: sum(memory[who].values()) for who in ("leader", "rank")})
        leaders, others = ([rank.peak for i, rank in enumerate(ranks) if (i in LEADERS) == leads] for leads in (1, 0))
        measured.append({"leader": max(leaders), "rank": max(others)})
        seconds = max(rank.seconds for rank in ranks)
    return {
        who: (planned[1][who] - planned[0][who], measured[1][who] - measured[0][who], seconds) for who in planned[0]
    }


def series() -> Iterator[Series]:
    """Yield the measured and the planned growth of a leader's and of another rank's memory."""
    with tempfile.TemporaryDirectory() as folder:
        found = growth(Path(folder), *PROMPTS)
    samples = (PROMPTS[1] - PROMPTS[0]) * stub_runs.GROUP
    for who, (plan, peak, seconds) in found.items():
        points = [Point(samples, seconds, peak), Point(samples, None, plan, computed=True)]
        note = f"planned {bytes_text(plan)}, measured {bytes_text(peak)} more than with {PROMPTS[0] * 4} samples"
        yield Series("plan", f"host memory of a {who}, {LENGTH} tokens a sample", "samples of 4 ranks", points, note)
