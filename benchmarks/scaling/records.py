"""What one rank computes and writes about the samples of a step: draws, advantages, metrics, completions,
the token log and the report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import torch

from benchmarks.scaling.fake_samples import GROUP, prompts, scored_group
from benchmarks.scaling.table import Point, Series, best_seconds, peak_bytes, reset_peak
from megagrpo.__main__ import main
from megagrpo.algorithms.advantages import advantages_of, reward_statistics
from megagrpo.config import AlgorithmSection
from megagrpo.data.packing.sample_packing import PackingRules, slices
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.records.rows.completions import completion_row
from megagrpo.records.rows.jsonl_file import JsonlFile, encoded
from megagrpo.records.rows.token_log import chosen_samples
from megagrpo.trainer.rollout.groups import useful_groups
from megagrpo.trainer.rollout.sample_metrics import pass_rates, rollout_metrics, staleness

COUNTS = (1_000, 16_000, 100_000)
TOKENS = 64  # of a response: the cost is that of samples, not of tokens
FILES = ("completions", "report")
RULES, ALGORITHM = PackingRules(max_tokens=32768, share_prompts=True), AlgorithmSection()

Work = Callable[[], object]


def samples_of(count: int) -> StepSamples:
    """Return `count` samples whose rollouts are all at hand."""
    return StepSamples.of([scored for prompt in prompts(count) for scored in scored_group(prompt, TOKENS)])


def advantages(samples: StepSamples) -> torch.Tensor:
    """Return the advantages [P, G] of samples."""
    return advantages_of(samples.rewards(GROUP), samples.rewards_by_function(GROUP), ALGORITHM, [1.0])


def works(samples: StepSamples, folder: Path) -> dict[tuple[str, str], Work]:
    """Return what is timed of these samples, by part and name. `folder` is the folder of a run."""
    count, own = len(samples), list(samples.own.values())
    flat = advantages(samples).flatten()

    def write() -> None:
        file = JsonlFile(folder / "completions.jsonl", 0)
        pairs = zip(own, flat.tolist(), strict=True)
        file.store(encoded([completion_row(1, *pair)]) for pair in pairs)
        file.close()

    def report() -> None:
        with redirect_stdout(StringIO()):
            assert main(["report", str(folder)]) == 0, "the folder is a run's"

    write()
    row = {"step": 1, "reward": 0.5, "num_tokens": 1.0, "wall_time": 0.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return {
        ("draws", "useful groups and pass rates"): lambda: (
            useful_groups(samples.rewards(GROUP)),
            pass_rates(samples, 1.0),
        ),
        ("draws", "four optimizer steps"): partial(slices, count, 4, 0),
        ("advantages", "of groups"): partial(advantages, samples),
        ("packing", "shapes from facts"): partial(samples.shapes, flat.numpy(), RULES),
        ("metrics", "of rollouts and rewards"): lambda: (
            rollout_metrics(samples),
            staleness(samples, 1),
            reward_statistics(samples.rewards(GROUP)),
        ),
        ("token log", "choice of four groups"): partial(chosen_samples, flat.tolist(), GROUP, 4),
        ("completions", "rows as JSON to a file"): write,
        ("report", "one step"): report,
    }


def series() -> Iterator[Series]:
    """Yield each work's seconds for 1,000 to 100,000 samples, and the memory that work on files adds."""
    kept: dict[tuple[str, str], Series] = {}
    for count in COUNTS:
        samples = samples_of(count)
        with tempfile.TemporaryDirectory() as folder:
            for (part, what), work in works(samples, Path(folder)).items():
                one = kept.setdefault((part, what), Series(part, what, "samples"))
                before = reset_peak() if part in FILES else 0
                seconds = best_seconds(work)
                one.points.append(Point(count, seconds, peak_bytes() - before if part in FILES else None))
    yield from kept.values()
