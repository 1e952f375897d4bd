"""Speedup of a run with generation ahead of training: the quickstart, synchronous and with `rollout.max_staleness`.

    python benchmarks/async_overlap.py --steps 12 rollout.prompts_per_step=4 train.learning_rate=2e-5
    python benchmarks/async_overlap.py --staleness 0,1,2            some minutes without a GPU; nothing else should run

The trainer has one core and the vLLM server another (taskset), so neither can use the other's idle time. One server
serves all runs, one after the other; each run pushes its own weights before its first step. Everything except the
placement and its required correction is configs/quickstart.yaml. Steps per second cover all steps, including the first,
which has no overlap. Evaluations, before the first step and after the last, do not count. The training time of a step
depends on what the policy has learned: long responses and groups with different rewards take longer. `step/train` is a
step's time over its training time, and does not depend on that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megagrpo.config import load_config
from megagrpo.engine.servers.serving import make_launcher
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform import device
from megagrpo.platform.process.variables import OPENMP, TOKEN_VARIABLE
from megagrpo.weights.files.tensor_files import dtype_name

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
ENDS = 3  # the last steps, whose rewards are averaged
COLUMNS = (
    "s/step",
    "steps/s",
    "faster",
    "waits",
    "trains",
    "syncs",
    "step/train",
    "trainer idle",
    "server idle",
    "age",
    "reward",
    "held out",
)


def train(max_staleness: int, url: str, token: str, folder: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of one run on `args.trainer_core`."""
    name = f"staleness{max_staleness}"
    options = [f"run.name={name}", f"run.output_dir={folder}", f"run.max_steps={args.steps}", "run.trackers=[]"]
    options += [f"rollout.urls=[{url}]", f"rollout.max_staleness={max_staleness}", *args.options]
    if max_staleness:
        options += ["algorithm.importance_correction=token_truncate"]
    command = [
        "taskset",
        "-c",
        str(args.trainer_core),
        sys.executable,
        "-m",
        "megagrpo",
        "train",
        str(QUICKSTART),
        *options,
    ]
    environment = os.environ | OPENMP | {"OMP_NUM_THREADS": "1", TOKEN_VARIABLE: token}
    # to watch the run; only the table goes to stdout
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}")
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def row(lines: Sequence[dict[str, float]], first: float | None) -> tuple[float, list[str]]:
    """Seconds per step, and the cells of the table; `first` are the seconds of the run to compare with."""
    steps = [line for line in lines if "reward" in line]
    held_out = [line["eval/reward"] for line in lines if "eval/reward" in line]
    mean = lambda name: statistics.fmean(line.get(name, 0.0) for line in steps)  # noqa: E731
    seconds = mean("time/step")
    reward = statistics.fmean(line["reward"] for line in steps[-ENDS:])
    cells = [f"{seconds:.2f}", f"{1 / seconds:.4f}", f"{(first or seconds) / seconds:.2f}"]
    cells += [f"{mean(f'time/{phase}'):.2f}" for phase in ("generate", "train", "sync")]
    cells += [
        f"{seconds / mean('time/train'):.2f}",
        f"{mean('idle/trainer'):.0%}",
        f"{mean('idle/servers'):.0%}",
        f"{mean('staleness/mean'):.2f}",
    ]
    return seconds, [*cells, f"{reward:.3f}", f"{held_out[0]:.3f} -> {held_out[-1]:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--staleness", type=lambda text: [int(n) for n in text.split(",")], default="0,1", help="one run for each"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trainer-core", type=int, default=0)
    parser.add_argument("--server-core", type=int, default=1)
    parser.add_argument("options", nargs="*", help="more overrides of the config, for all runs: key=value")
    args = parser.parse_args()
    config = load_config(QUICKSTART, args.options)
    dtype = dtype_name(device.engine_precision(device.resolve_precision(config.model.precision)))
    with tempfile.TemporaryDirectory() as folder:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {args.server_core})  # the server inherits it
        with make_launcher(config, resolve_model(config.model.path), Path(folder), dtype) as launcher:
            launcher.start()
            os.sched_setaffinity(0, cores)
            (url,) = launcher.wait()
            first, rows = None, {}
            for max_staleness in args.staleness:
                seconds, rows[max_staleness] = row(train(max_staleness, url, launcher.token, Path(folder), args), first)
                first = first or seconds
    print(f"{args.steps} steps, {os.getloadavg()[0]:.1f} load at the end\n\n| max_staleness | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for max_staleness, cells in rows.items():
        print(f"| {max_staleness} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
