"""Does a model learn with each loss? The quickstart's task (SmolLM2-135M-Instruct, "What is A + B?") once with every
one of them.

    python benchmarks/learning.py                          all, one after the other: some minutes each without a GPU
    python benchmarks/learning.py cispo gspo --steps 12

Everything but the loss, the steps and the length of the responses, up to 24 tokens, is configs/quickstart.yaml. Losses
that clip or weight the probability ratio take two optimizer steps for each generation (`steps_per_generation`, for real
`num_iterations`): in a single step the ratio is 1 and all losses average the same quantity.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TWICE = dict(steps_per_generation=2)
LOSSES: dict[str, dict[str, object]] = {
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28, **TWICE),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence", epsilon=2e-3, epsilon_high=2.5e-3, **TWICE),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=2e-2, epsilon_high=3e-2, **TWICE),
    "gspo_token": dict(
        loss_type="grpo", importance_sampling_level="sequence_token", epsilon=2e-2, epsilon_high=3e-2, **TWICE
    ),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0, **TWICE),
    "sapo": dict(loss_type="sapo", **TWICE),
    "vespo": dict(loss_type="vespo", **TWICE),
    "gmpo": dict(loss_type="gmpo", epsilon=0.4, epsilon_high=0.4, **TWICE),
    "fipo": dict(loss_type="fipo", **TWICE),
    "entropy_bonus": dict(loss_type="dapo", entropy_coef=1e-3),
    "top_entropy": dict(loss_type="dapo", top_entropy_quantile=0.5),
}
ENDS = 3  # steps at the start and at the end whose rewards are averaged


@dataclass(frozen=True)
class Learnt:
    """Mean reward of the first and of the last steps, and on the held-out questions before and after."""

    first: float
    last: float
    before: float
    after: float
    seconds: float

    @property
    def rises(self) -> bool:
        """Whether both rewards show learning."""
        return self.last > self.first + 0.1 and self.after > self.before


def learn(name: str, folder: Path, steps: int = 12) -> Learnt:
    """Run the loss into `folder`/NAME. RuntimeError with the end of its output when it fails."""
    options = [f"algorithm.{key}={value}" for key, value in LOSSES[name].items()]
    places = [f"run.name={name}", f"run.output_dir={folder}", f"run.max_steps={steps}", "run.trackers=[]"]
    options.append("rollout.max_completion_length=24")
    command = [ROOT / "launch" / "local.sh", ROOT / "configs" / "quickstart.yaml", *places, *options]
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    held_out = [line["eval/reward"] for line in lines if "eval/reward" in line]
    seconds = time.monotonic() - started
    return Learnt(
        statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:]), held_out[0], held_out[-1], seconds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="LOSS", help=f"of {', '.join(LOSSES)}; all of them without any")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "learning")
    args = parser.parse_args()
    if unknown := sorted({*args.names} - {*LOSSES}):
        parser.error(f"{', '.join(unknown)}: not among {', '.join(LOSSES)}")
    print(
        f"quickstart, {args.steps} steps, {os.cpu_count()} cores; reward over {ENDS} steps at either end, and over "
        "held-out questions"
    )
    print("| loss | first | last | before | after | seconds |\n|---|---|---|---|---|---|")
    for name in args.names or LOSSES:
        r = learn(name, args.folder, args.steps)
        print(
            f"| {name} | {r.first:.2f} | {r.last:.2f} | {r.before:.2f} | {r.after:.2f} | {r.seconds:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
