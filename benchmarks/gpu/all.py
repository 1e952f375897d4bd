"""All benchmarks on one GPU, and the tests that need one, each with its own time limit, in order of importance.

    python -m benchmarks.gpu.all                    # 25 minutes at most, into runs/gpu
    python -m benchmarks.gpu.all --minutes 9        # 9 minutes; a second call continues with the remaining parts
    python -m benchmarks.gpu.all --only train_7b sleep_wake
    python -m benchmarks.gpu.all --dry-run

It begins with the checks of `megagrpo doctor`. The output of each part goes to runs/gpu/NAME.txt at once, and all
outputs to runs/gpu/results.txt after each part. runs/gpu/report.json is the one file to send: findings, outputs and
exit codes of all parts, without secrets. A part that fails or reaches its limit keeps its output and does not stop the
others. The exit code is the number of parts without success.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import report, write_report
from benchmarks.gpu.setting import ROOT
from megagrpo.cluster.doctor.checkup import check_up
from megagrpo.cluster.doctor.machine import Finding, Machine
from megagrpo.cluster.doctor.needs import Needs
from megagrpo.commands.setup.doctor import lines

MINUTES = 25.0
GRACE_SECONDS = 15.0  # between SIGTERM and SIGKILL, for servers to end
LEAST_SECONDS = 20.0  # needed to start a part


@dataclass(frozen=True)
class Part:
    """A command and its time limit in seconds."""

    name: str
    words: tuple[str, ...]
    limit: float

    @property
    def command(self) -> list[str]:
        return [sys.executable, *self.words]

    @property
    def dry(self) -> list[str]:
        """Return the dry run of this part, which needs no GPU."""
        return [*self.command, "--collect-only", "-q"] if "pytest" in self.words else [*self.command, "--dry-run"]


def benchmark(name: str, module: str, limit: float, *words: str) -> Part:
    return Part(name, ("-m", f"benchmarks.gpu.{module}", *words), limit)


def tests(name: str, limit: float, *files: str) -> Part:
    return Part(
        name, ("-m", "pytest", "-m", "gpu", "-q", "-rs", "--no-header", "-p", "no:cacheprovider", *files), limit
    )


PARTS = (
    benchmark("ceilings", "setting", 60),
    tests("parity", 300, "tests/gpu/test_gpu_parity.py", "tests/gpu/test_gpu_fp8.py"),
    benchmark("logprobs", "logprobs", 120),
    benchmark("train_7b", "train_step", 240, "--models", "7b"),
    Part("transport", ("-m", "pytest", "-q", "-rs", "--no-header", "tests/distributed/test_cuda_sync.py"), 90),
    benchmark("weight_sync_7b", "weight_sync", 180),
    benchmark("sleep_wake", "sleep_wake", 180),
    benchmark("whole_step_135m", "whole_step", 200, "--limit", "180"),
    benchmark("train_small", "train_step", 150, "--models", "0.5b", "1.5b"),
    benchmark("train_moe", "train_step", 150, "--models", "30b-a3b"),
    benchmark("whole_step_1.5b", "whole_step", 300, "--model", "1.5b", "--limit", "270"),
    tests("tests", 500, "--ignore=tests/gpu/test_gpu_parity.py", "--ignore=tests/gpu/test_gpu_fp8.py"),
)


def run(part: Part, folder: Path, limit: float) -> str:
    """Run one part with its output in its file; return a line with its result."""
    file, started = folder / f"{part.name}.txt", time.monotonic()
    with file.open("wb") as out:
        out.write(f"$ {' '.join(('python', *part.words))}\n".encode())
        out.flush()
        process = subprocess.Popen(part.command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            outcome = f"exit code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            outcome = f"ended at its limit of {limit:.0f} s"
            end(process)
    line = f"=== {part.name}: {outcome} after {time.monotonic() - started:.0f} s"
    with file.open("a") as out:
        out.write(f"{line}\n")
    return line


def end(process: subprocess.Popen) -> None:
    """End a process with its group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def is_done(part: Part, folder: Path) -> bool:
    """Whether an earlier call has completed this part."""
    file = folder / f"{part.name}.txt"
    return file.exists() and f"=== {part.name}: exit code 0 " in file.read_text(errors="replace")


def gather(folder: Path, parts: Sequence[Part], machine: Machine, findings: Sequence[Finding]) -> None:
    """Write results.txt, the output of all parts so far in their order, and report.json with their exit codes and the
    findings."""
    files = {part.name: folder / f"{part.name}.txt" for part in parts}
    texts = {name: file.read_text(errors="replace") for name, file in files.items() if file.exists()}
    (folder / "results.txt").write_text("\n".join(texts.values()))
    content = report(machine, findings, parts={part.name: outcome(part, texts.get(part.name)) for part in parts})
    write_report(folder / "report.json", content, machine.environment)


def outcome(part: Part, text: str | None) -> dict[str, Any]:
    """Return command, exit code and output of a part. Without an exit code it did not run, or reached its limit."""
    made: dict[str, Any] = {"command": " ".join(("python", *part.words)), "limit_seconds": part.limit}
    if text is None:
        return made | {"result": "not run", "exit_code": None}
    ends = re.findall(rf"^=== {re.escape(part.name)}: (.*)$", text, re.MULTILINE)
    code = re.match(r"exit code (-?\d+)", ends[-1]) if ends else None
    return made | {
        "result": ends[-1] if ends else "unfinished",
        "exit_code": int(code[1]) if code else None,
        "output": text,
    }


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    made.add_argument(
        "--only",
        nargs="+",
        choices=[part.name for part in parts],
        metavar="NAME",
        help="these, whether they are done or not",
    )
    made.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu")
    made.add_argument("--dry-run", action="store_true", help="each part's dry run; of tests, which there are")
    args = made.parse_args(arguments)
    ends = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    chosen = (
        [part for part in parts if part.name in args.only]
        if args.only
        else [p for p in parts if args.dry_run or not is_done(p, args.folder)]
    )
    machine, bad = Machine(), 0
    findings = check_up(machine, Needs())
    print("\n".join(lines(findings)), flush=True)
    for part in chosen:
        if args.dry_run:
            print(f"\n=== {part.name}, {part.limit:.0f} s at most: python {' '.join(part.words)}", flush=True)
            bad += subprocess.run(part.dry, cwd=ROOT).returncode != 0
            continue
        left = ends - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"=== {part.name}: no time left", flush=True)
            bad += 1
            continue
        line = run(part, args.folder, min(part.limit, left))
        bad += "exit code 0 " not in line
        print((args.folder / f"{part.name}.txt").read_text(errors="replace"), flush=True)
        gather(args.folder, parts, machine, findings)
    return bad


if __name__ == "__main__":
    sys.exit(main())
