"""Seconds and GB/s of weight syncs from a policy on the GPU into a vLLM server on the same GPU, by CUDA IPC, beside a
plain copy.

    python -m benchmarks.gpu.weight_sync                      # Qwen2.5-7B's shape, random weights
    python -m benchmarks.gpu.weight_sync --model 0.5b --syncs 10
    python -m benchmarks.gpu.weight_sync --dry-run

One rank, one server, TP=1 -> TP=1, with all defaults: each element is checked to be finite, read once, and its checksum
compared on both sides. Every weight changes before each sync. Columns and phases as in `benchmarks/weight_sync.py`;
copy is torch's `copy_` of all parameters into memory of the same GPU. GB are of weights, counted once. The GPU holds
the weights three times for a moment.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.setting import LARGE, SMALL, TINY, begin, parse, parser, run_config, shape, wait, write_shape
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.planner.costs.shapes import num_parameters
from megagrpo.planner.times.step_times import sync_parts, sync_seconds

TARGET = "target on one H200: end to end < 1 s at 7b"
# it generates few tokens
SERVER = ("rollout.enforce_eager=true", "rollout.max_completion_length=256", "rollout.max_num_seqs=16")
EXACT = 0.4  # nats, limit for equal random weights: bf16 on both sides, in different kernels; 0.20 on an H200
MOVED = dict(check="check", publish="publish, beside the others", read="read", total="end to end")
NAMED = ("pause", "start", "layers", "resume")


def describe(name: str, config, gpu) -> str:
    """Print the plan: the bytes, and the minimal time of their sync."""
    model = parse_hf_config(shape(name))
    size = 2 * num_parameters(model)
    copies = size / (gpu.memory_gb_per_s / 2 * 1e9)
    return (
        f"{name}: {num_parameters(model)} parameters, {size} bytes in bf16; policy, buffer and server hold "
        f"{3 * size / 2**30:.1f} GiB\n"
        f"  a copy takes {copies:.4f} s at the data sheet's {gpu.memory_gb_per_s:g} GB/s, and a sync publishes and "
        f"reads\n"
        f"  predicted by the plan {sync_seconds(sync_parts(config, model, 1, gpu)):.3f} s; rollout.placement "
        f"{config.rollout.placed}"
    )


def measure(config, scratch: Path, syncs: int) -> tuple[list[dict[str, float]], str]:
    """(the times of each sync, including the first; the transport)."""
    import torch

    from benchmarks.gpu.pair import pair
    from benchmarks.weight_sync import change, difference, one_row, requests_timed

    rows = []
    torch.manual_seed(0)
    with pair(config, scratch, trains=False) as both:
        for number in range(1, syncs + 2):
            change(both.chunks)
            copy = plain_copy(both.chunks)
            with requests_timed() as requests:
                report = both.push()
            row = one_row(report, requests) | {"copy": copy, "difference": difference(both.chunks, both.engine, number)}
            print(f"sync {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            rows.append(row)
        return rows, both.transport


def plain_copy(chunks) -> float:
    """Seconds for copying all parameters one by one into the same memory."""
    parameters = [p.detach().view(-1) for chunk in chunks for p in chunk.parameters()]
    buffer = max(parameters, key=len).clone()
    for _ in range(2):  # the first round warms up
        wait()
        started = time.perf_counter()
        for values in parameters:
            buffer[: len(values)].copy_(values)
        wait()
    return time.perf_counter() - started


def table(name: str, rows: list[dict[str, float]], transport: str) -> str:
    """The medians of all syncs but the first."""
    median = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    gb = median["bytes"] / 1e9
    rest = median["total"] - sum(median[key] for key in ("check", "read", *NAMED))
    lines = [f"{name}, {gb:.3f} GB by {transport}", f"{'':28}{'s':>8}{'GB/s':>10}{'of copy':>9}"]
    lines.append(f"{'plain copy':28}{median['copy']:8.4f}{gb / median['copy']:10.1f}")
    for key, words in MOVED.items():
        lines.append(f"{words:28}{median[key]:8.4f}{gb / median[key]:10.1f}{median['copy'] / median[key]:9.1%}")
    lines += [f"{key:28}{median[key]:8.4f}" for key in NAMED]
    lines += [f"{'everything else':28}{rest:8.4f}", f"{'first sync':28}{rows[0]['total']:8.4f}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--model", choices=(*SMALL, *LARGE, TINY), default="7b")
    made.add_argument("--syncs", type=int, default=5, help="after the first")
    args = parse(made, arguments)
    gpu, _ = begin(args)
    with tempfile.TemporaryDirectory(prefix="weight_sync_") as scratch:
        folder = write_shape(shape(args.model), Path(scratch) / args.model)
        config = run_config(folder, *SERVER, *args.overrides)
        if args.dry_run:
            print(describe(args.model, config, gpu), TARGET, sep="\n")
            return 0
        rows, transport = measure(config, Path(scratch), args.syncs)
    print(table(args.model, rows, transport))
    worst = max(row["difference"] for row in rows)
    print(f"largest |dlogprob| of server and policy after any sync: {worst:.2g}, {EXACT:g} is allowed\n{TARGET}")
    return 0 if worst <= EXACT else 1


if __name__ == "__main__":
    sys.exit(main())
