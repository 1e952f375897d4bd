"""Seconds of the parts of a step that one rank computes for all samples of the step, without their tokens.

    python benchmarks/step_parts.py    # 1,000 to 100,000 samples

`PARTS` maps a name to a function that prepares inputs of N samples and returns the work to be timed. The slope is that
of a straight line through (log samples, log CPU seconds).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.algorithms.advantages import group_advantages, normalized_sum_advantages, reward_statistics
from megagrpo.algorithms.entropy import quantile
from megagrpo.config import DataSection
from megagrpo.data.packing.sample_packing import PackingRules, SampleShapes, plan_packing, slices
from megagrpo.data.sources.prompt_order import Curriculum
from megagrpo.proof.report.collect import read_run
from megagrpo.proof.report.shown_responses import choose
from megagrpo.records.rows.jsonl_file import encoded

SIZES, GROUP, RANKS, BUDGET = (1_000, 4_000, 16_000, 100_000), 8, 32, 32768
Work = Callable[[], object]


def packing_plan(count: int, share_prompts: bool) -> Work:
    """The whole plan: bundles, micro-batches, counts and balance, of lognormal lengths with prompts of 200 tokens."""
    lengths = np.random.default_rng(0).lognormal(np.log(BUDGET / 8), 1, count).astype(np.int64).clip(201, BUDGET)
    columns = np.full(count, 200), np.arange(count) // GROUP, lengths - 200, np.ones(count), np.zeros(count, dtype=bool)
    shapes, rules = SampleShapes(lengths, *columns), PackingRules(BUDGET, share_prompts=share_prompts)
    return lambda: plan_packing(shapes, rules, RANKS)


def pass_rates(count: int) -> Work:
    """What the curriculum learns from a step, its metrics, and the history that a checkpoint holds."""
    curriculum = Curriculum(DataSection.model_validate({"train": {"source": "x"}, "curriculum": [0.1, 0.9]}))
    rates, epochs = dict.fromkeys(range(count), 0.5), dict.fromkeys(range(count), 0)

    def work() -> None:
        curriculum.learn(rates, epochs)
        curriculum.metrics(1)
        curriculum.history = curriculum.history

    return work


def rewards(count: int, *functions: int) -> torch.Tensor:
    """Rewards [P, G] or, with a number of functions, [P, G, F]."""
    return torch.rand(count // GROUP, GROUP, *functions, generator=torch.Generator().manual_seed(0)).double()


def row(index: int) -> dict[str, Any]:
    """A line of `completions.jsonl` with a response of 2,000 characters."""
    return {
        "step": 1,
        "prompt_id": index // GROUP,
        "prompt": [{"role": "user", "content": f"What is {index // GROUP}?"}],
        "completion": " ".join(str(index * factor) for factor in range(1, 1000))[:2000],
        "num_tokens": 800,
        "finish_reason": "stop",
        "reward": float(index % 3 == 0),
        "rewards": {"exact_number": 1.0},
        "advantage": 0.5,
        "weight_version": 0,
    }


def completions(count: int) -> Work:
    """The lines of `completions.jsonl`, in parts of 64, without the writing."""
    part = [row(index) for index in range(64)]
    return lambda: [len(encoded(part)) for _ in range(count // 64)]


def report(count: int) -> Work:
    """The choice of the responses that a page of 2 MB shows, of a run of one step."""
    folder = tempfile.TemporaryDirectory()
    with open(Path(folder.name) / "completions.jsonl", "wb") as file:
        file.writelines(encoded([row(index)]) for index in range(count))
    (Path(folder.name) / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    return lambda: choose(read_run(Path(folder.name)), 2_000_000)  # holds the folder


PARTS: dict[str, Callable[[int], Work]] = {
    "packing plan": lambda count: packing_plan(count, share_prompts=False),
    "packing plan, shared prompts": lambda count: packing_plan(count, share_prompts=True),
    "slices for 4 optimizer steps": lambda count: lambda: slices(count, 4, seed=0),
    "advantages": lambda count: partial(group_advantages, rewards(count), "group"),
    "advantages by function": lambda count: partial(normalized_sum_advantages, rewards(count, 3), torch.ones(3)),
    "reward metrics": lambda count: partial(reward_statistics, rewards(count)),
    "threshold of the top entropies, 100 tokens a sample": lambda count: partial(
        quantile, torch.rand(100 * count), 0.8, lambda counts, _: counts
    ),
    "curriculum": pass_rates,
    "completions.jsonl, 2,000 characters a line": completions,
    "report, 2,000 characters a response": report,
}


def measure(part: str, sizes: Sequence[int] = SIZES, repeats: int = 3) -> tuple[list[float], float]:
    """Return the least CPU seconds of a part for each number of samples, and the slope."""
    seconds = []
    for count in sizes:
        work, taken = PARTS[part](count), []
        for _ in range(repeats):
            begun = time.process_time()
            work()
            taken.append(time.process_time() - begun)
        seconds.append(min(taken))
    return seconds, float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def main() -> None:
    torch.set_num_threads(1)
    print("| part of a step | " + " | ".join(f"s, {count:,}" for count in SIZES) + " | slope |")
    print("|---" * (len(SIZES) + 2) + "|")
    for part in PARTS:
        seconds, slope = measure(part)
        print(f"| {part} | " + " | ".join(f"{value:.4f}" for value in seconds) + f" | {slope:.2f} |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
