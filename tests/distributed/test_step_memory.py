"""The planned host memory of a step's samples, against the resident memory of real ranks that collect, exchange, pack
and write them."""

import ctypes
import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import run_ranks
from suites import usual

from benchmarks.scaling.step_memory import planned_step_memory
from megagrpo.config import ParallelSection, load_config
from megagrpo.data.packing.sample_packing import PackingRules, build_batch, plan_packing
from megagrpo.planner.costs.workload import Lengths
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.platform.process.phases import Phases
from megagrpo.records.rows.completions import completion_lines
from megagrpo.records.rows.recorder import TrainedRollouts
from megagrpo.trainer.rollout.collector import Collector, numbered
from megagrpo.trainer.rollout.token_exchange import trained_samples
from megagrpo.types import Prompt, Rollout, SamplingParams, ScoredRollout

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
GROUP, PROMPT, RESPONSE = 8, 64, 512


class Sampler:
    """Engine and rewards of a replica."""

    def groups(self, asked, n, sampling, seed):
        draw = np.random.default_rng(seed)
        for index, prompt in enumerate(asked):
            ids = [draw.integers(0, 150_000, RESPONSE).astype(np.int32) for _ in range(n)]
            logprobs = [-draw.random(RESPONSE, np.float32) for _ in range(n)]
            texts = ["".join(["word"] * RESPONSE) for _ in range(n)]
            yield (
                index,
                [Rollout(prompt, *row, "stop", 1, text) for *row, text in zip(ids, logprobs, texts, strict=True)],
            )

    def begin(self, step, task=""):
        scored = []

        def add(index, rollouts):
            scored.extend(ScoredRollout(r, {"exact": float(i)}, float(i)) for i, r in enumerate(rollouts))

        return SimpleNamespace(add=add, finish=lambda: scored, counters=dict, drop=lambda: None)


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def step(layout: Layout, prompts: int) -> None:
    sampler = Sampler() if layout.is_dp_leader else None
    asked = numbered([Prompt(i, tuple(range(1000, 1000 + PROMPT)), "What is it?", position=i) for i in range(prompts)])
    samples, _ = Collector(layout, sampler, sampler, Phases()).collect(asked, GROUP, SamplingParams(1.0, RESPONSE), 0)
    rules = PackingRules(max_tokens=8 * (PROMPT + RESPONSE), at_least=2)
    plan = plan_packing(samples.shapes(np.ones(len(samples)), rules), rules, layout.dp_size)
    batch = build_batch(plan, layout.dp_rank, trained_samples(samples, [plan], layout), rules)
    lines = list(completion_lines(layout, TrainedRollouts(1, samples, [1.0] * len(samples))))
    assert batch.micro_batches and bool(lines) == (layout.world_rank == 0), "the step made no batch or no lines"


def used(prompts: int) -> tuple[bool, int]:
    """Whether the rank is a leader, and the bytes by which its resident memory grows in a step."""
    layout = init_layout(ParallelSection(pp=2))
    step(layout, 8)  # imports, connections
    grown = []
    for _ in range(2):  # the kernel may evict pages of libraries meanwhile, which lowers one
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        step(layout, prompts)
        grown.append(resident("VmHWM") - before)
    layout.close()
    return layout.is_dp_leader, max(grown)


@pytest.mark.parametrize("prompts", usual([250, 1000], 0))
def test_the_memory_of_2000_and_8000_responses_on_four_ranks_is_what_the_plan_says(prompts):
    sizes = [f"rollout.prompts_per_step={prompts}", f"rollout.num_generations={GROUP}", "rollout.max_num_seqs=1"]
    config = load_config(QUICKSTART, ["parallel.pp=2", *sizes])
    planned = planned_step_memory(config, 4, Lengths(PROMPT, RESPONSE, RESPONSE))
    for is_leader, grown in run_ranks(used, 4, prompts):
        expected = sum(planned["leader" if is_leader else "rank"].values())
        assert 0.7 < grown / expected < 1.3, f"grown by {grown / 2**20:.1f} MiB, planned {expected / 2**20:.1f}"
        print(f"leader {is_leader}: {grown / 2**20:.1f} MiB, planned {expected / 2**20:.1f}")
