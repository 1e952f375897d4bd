"""What a training step costs besides the model, when it grows to 100,000 samples and thousands of ranks.

    python benchmarks/scale.py                              # everything, in less than five minutes on two cores
    python benchmarks/scale.py --parts packing client       # some parts
    python benchmarks/scale.py --picture docs/images/scale.svg

Stub engines answer the requests, and fake ranks are processes with real gloo groups, so no model is needed. Each part
is a file of `benchmarks/scaling/` and runs in a process of its own. The table has a row per size: seconds, bytes, and
in the last measured row the slope of log seconds against log size (1 is linear). A row marked `computed` was not run:
it follows from measured seconds and bytes, or from a plan. Sizes end at 100,000 samples and 16,384 ranks.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by its path, this file sees only its own folder

from benchmarks.scaling.table import HEADER, Series, draw, lines_of
from megagrpo.platform.process.variables import OPENMP

PARTS = (
    "packing",
    "records",
    "exchange",
    "client",
    "conversations",
    "agreement",
    "sync_plans",
    "start",
    "rewards",
    "planned",
    "order",
)


def run_part(name: str, results: Connection) -> None:
    """Send each series of a part, then None. What the part prints goes to stderr."""
    os.dup2(2, 1)
    try:
        for series in importlib.import_module(f"benchmarks.scaling.{name}").series():
            results.send(series)
    except Exception:
        traceback.print_exc()
        results.send(Series(name, "failed: the error is above", "", note="this part failed"))
    results.send(None)


def measured(name: str) -> list[Series]:
    """Run a part in a fork, which has all modules, and print its rows as they come."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=run_part, args=(name, there))
    process.start()
    there.close()
    kept: list[Series] = []
    try:
        while (series := here.recv()) is not None:
            print("\n".join(lines_of(series)) or f"| {series.part} | {series.what} | | | | | |", flush=True)
            kept.append(series)
    except EOFError:
        kept.append(Series(name, "failed: its process ended", "", note="this part failed"))
    process.join()
    return kept


def cpu_name() -> str:
    """Return the model of this machine's CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main() -> int:
    """Run the parts, print the table and the notes, and draw the plot. Returns 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--picture", type=Path, default=Path("runs/benchmark/scale.svg"), help="SVG to write")
    args = parser.parse_args()
    os.environ.update(OPENMP | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ)
    begun = time.perf_counter()
    for name in args.parts:  # imported here once for all forks
        importlib.import_module(f"benchmarks.scaling.{name}")
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the beginning\n")
    print(HEADER)
    kept = [series for name in args.parts for series in measured(name)]
    print()
    for series in kept:
        if series.note:
            print(f"- {series.part}, {series.what}: {series.note}")
    draw(kept, args.picture)
    print(f"\n{args.picture}; {time.perf_counter() - begun:.0f} s in all, load {os.getloadavg()[0]:.1f} at the end")
    return int(any(series.note == "this part failed" for series in kept))


if __name__ == "__main__":
    sys.exit(main())
