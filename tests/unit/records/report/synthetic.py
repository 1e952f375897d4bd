"""Run folders for the report: metrics, responses and tokens in the format of a run's own sinks."""

import json
import math
import random
from pathlib import Path

from megagrpo.config import ParallelSection, load_config, save_resolved
from megagrpo.data.step_samples import StepSamples
from megagrpo.records.recorder import TrainedRollouts
from megagrpo.records.sinks.jsonl import JsonlSink
from megagrpo.records.sinks.sink import TrackedRun
from megagrpo.records.starts import record_start
from megagrpo.records.token_log import TokenLog
from megagrpo.types import Prompt, Rollout, ScoredRollout
from tests.unit.records.completion_rows import completion_parts

CONFIG = Path(__file__).parents[4] / "configs" / "quickstart.yaml"
STEMS = ("sum", "add", "carry", "digit", "then", "equals", "answer", "check")
WORDS = [f"{stem}{end}" for stem in STEMS for end in ("", "s", "ing", " is", ",", ".")]
PHASES = {"generate": 6.0, "reward": 0.01, "logprobs": 0.5, "train": 4.0, "sync": 1.0}


class Texts:
    """Stands in for a tokenizer's texts: token i is the word i."""

    def of(self, token_ids) -> list[str]:
        return [f" {WORDS[token % len(WORDS)]}" for token in token_ids]


class OneRank:
    """The layout of one process."""

    world_rank = tp_rank = cp_rank = 0
    world_size = 1
    sizes = dict.fromkeys(("tp", "cp", "pp", "dp", "ep"), 1)
    parallel = ParallelSection()

    def leader_of(self, dp_rank: int) -> int:
        return dp_rank

    def all_reduce(self, values, reduction: str = "sum"):
        return values


def metrics(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    """The metrics of a step of a run that learns."""
    done = step / steps
    times = {f"time/{phase}": seconds * rng.uniform(0.9, 1.1) for phase, seconds in PHASES.items()}
    whole = sum(times.values()) + 0.05
    return {
        "reward": 0.2 + 0.7 * done + rng.gauss(0, 0.03), "reward_std": 0.4 - 0.3 * done, "reward_std_batch": 0.45 - 0.3 * done,
        "frac_reward_zero_std": 0.2 + 0.5 * done, "rewards/exact_number/mean": 0.2 + 0.7 * done, "rewards/exact_number/std": 0.3,
        "rewards/exact_number/exceptions": 0.0, "rewards/format/mean": 0.5 + 0.4 * done, "loss": rng.gauss(0, 0.01),
        "entropy": 2 * math.exp(-2 * done), "token_mult_prob_error": 1.02 + rng.uniform(0, 0.01), "gen_kl_error": 1e-4 * rng.random(),
        "policy_kl_error": 1e-4 * rng.random(), "js_divergence_error": 1e-5 * rng.random(), "grad_norm": rng.uniform(0.5, 1.5),
        "learning_rate": 1e-6 * (1 - done), "clip_ratio/low_mean": 0.001 * rng.random(), "clip_ratio/high_mean": 0.002 * rng.random(),
        "completions/mean_length": 200 + 80 * done, "completions/clipped_ratio": 0.1 * (1 - done), "num_tokens": 153600.0,
        "idle/trainer": 0.5, "idle/servers": 0.4, "tokens_per_second": 153600 / whole, "memory_gb": 40 + 2 * done,
        "mismatch/alarms": 0.0, "train/skipped_steps": 0.0, "checkpoint/failures": 0.0, **times, "time/step": whole,
    }  # fmt: skip


def rollouts(step: int, groups: int, size: int, length: int, rng: random.Random) -> list[ScoredRollout]:
    """Scored rollouts of a step, whose responses are random words."""
    made = []
    for group in range(groups):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {step} + {group}?"},
        ]
        prompt = Prompt(group, (1, 2), messages)
        for _ in range(size):
            tokens = tuple(rng.randrange(len(WORDS)) for _ in range(length))
            logprobs = tuple(-rng.expovariate(2) for _ in tokens)
            reward, cut = float(rng.random() < 0.5), rng.random() < 0.2
            text = "".join(f" {WORDS[token]}" for token in tokens)
            rollout = Rollout(prompt, tokens, logprobs, "length" if cut else "stop", step, text)
            made.append(ScoredRollout(rollout, {"exact_number": reward, "format": 1.0}, reward))
    return made


def advantages(scored: list[ScoredRollout], size: int) -> list[float]:
    """Rewards minus the mean of their group."""
    values = []
    for start in range(0, len(scored), size):
        rewards = [s.reward for s in scored[start : start + size]]
        values += [reward - sum(rewards) / size for reward in rewards]
    return values


def make_run(
    folder: Path,
    steps: int = 6,
    groups: int = 4,
    size: int = 4,
    length: int = 12,
    seed: int = 0,
    overrides: tuple = (),
    evaluate: bool = True,
) -> Path:
    """Write a run's folder through the sinks of a run."""
    rng = random.Random(seed)
    options = (
        f"run.max_steps={steps}",
        f"rollout.num_generations={size}",
        "run.trackers=[]",
        "run.log_completions_steps=0",
    )
    config = load_config(CONFIG, [f"run.name={folder.name}", *options, *overrides])
    save_resolved(config, folder)
    writer = JsonlSink(TrackedRun(folder, config))
    record_start(folder, 0, OneRank(), "bfloat16")  # type: ignore[arg-type]
    tokens = TokenLog(OneRank(), Texts(), 1, size, print)  # type: ignore[arg-type]
    tokens.open(folder, 0)
    writer.message(f"{config.run.name}: a model in float32 on 1 rank(s)")
    if evaluate:
        writer.evaluation(0, {"eval/pass@1": 0.25, "eval/reward": 0.25})
    for step in range(1, steps + 1):
        scored = rollouts(step, groups, size, length, rng)
        values = advantages(scored, size)
        writer.store(completion_parts(step, scored, values))
        trained = TrainedRollouts(step, StepSamples.of(scored), values)
        tokens.begin(trained)
        for i in tokens._chosen:
            noisy = [round(value + rng.gauss(0, 0.03), 3) for value in scored[i].rollout.rollout_logprobs.tolist()]
            tokens._values[i] = (noisy, [0.5] * length)
        tokens.finish(trained)
        writer.step(step, metrics(step, steps, rng))
        if evaluate and step % max(1, steps // 3) == 0:
            writer.evaluation(
                step, {"eval/pass@1": 0.25 + 0.7 * step / steps, "eval/reward": 0.25 + 0.7 * step / steps}
            )
    writer.message(f"finished {steps} steps")
    writer.close()
    tokens.close()
    return folder


def append(file: Path, row: dict) -> None:
    """Append a row to a JSONL file, lone surrogates as escapes."""
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def add_layers(folder: Path, layers: range, seed: int = 0) -> Path:
    """Give each step of a run the agreement of its routers with replayed routes, lower in deeper layers."""
    rng, rows = random.Random(seed), []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "reward" in row:
            shares = {str(i): 1 - 0.001 * (2 + i) * rng.uniform(0.7, 1.3) * (1 + row["step"] / 40) for i in layers}
            mean = sum(shares.values()) / len(shares)
            row |= {"routing/agreement": mean, "routing/agreement_min": min(shares.values())}
            row["routing/agreement_by_layer"] = shares
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder
