"""Ranks and commands on GPUs that do not exist.

`MEGAGRPO_FAKE_GPU` names a folder with FakeGPU (github.com/FanBB2333/FakeGPU): libraries that answer CUDA's calls on
host memory, and a coordinator that carries NCCL's messages. Preloaded, they make torch's CUDA build see GPUs. Its
allocator, streams, events, pinned memory and ProcessGroupNCCL run unchanged. `tests/fake_gpu/kernels.py` computes in
place of the kernels.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

VARIABLE = "MEGAGRPO_FAKE_GPU"
ROOT = Path(__file__).parents[2]
COORDINATOR = "fakegpu-coordinator"
LIBRARIES = ("libcublas.so.12", "libcudart.so.12", "libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2")
START_SECONDS = 20.0
# for one test: two starts of ranks may take 600 s each (ranks.py), and the error then names the ranks
TEST_SECONDS = 1500


def missing() -> str | None:
    """Return why no fake GPU can run here, if so."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} does not name the folder of a CUDA runtime without a GPU"
    if absent := [name for name in (COORDINATOR, *LIBRARIES) if not Path(folder, name).exists()]:
        return f"{VARIABLE}: {folder} lacks {', '.join(absent)}"
    return None if torch.version.cuda else "the installed torch is not built for CUDA"


needs_fake_gpu = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@contextlib.contextmanager
def fake_gpus(count: int, **more: str) -> Iterator[dict[str, str]]:
    """Context manager: start a coordinator, and yield the environment in which a process sees `count` H100s. `more` are
    further variables."""
    folder = Path(os.environ[VARIABLE])
    with tempfile.TemporaryDirectory(prefix="fake_gpu_") as place:
        socket = f"{place}/nccl"
        coordinator = subprocess.Popen(
            [folder / COORDINATOR, "--transport", "unix", "--address", socket],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not Path(socket).exists():
                if coordinator.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{folder / COORDINATOR} did not open {socket}")
                time.sleep(0.02)
            yield environment(folder, socket, count) | more
        finally:
            coordinator.kill()
            coordinator.wait()


def environment(folder: Path, socket: str, count: int) -> dict[str, str]:
    """Return the variables that a process on fake GPUs needs, in addition to this process's environment."""
    path = [Path(__file__).parent / "site", ROOT, ROOT / "tests" / "distributed", os.environ.get("PYTHONPATH")]
    return {
        "LD_PRELOAD": ":".join(str(folder / name) for name in LIBRARIES),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": ":".join(str(entry) for entry in path if entry),
        "FAKEGPU_DEVICE_COUNT": str(count),
        "FAKEGPU_PROFILE": "h100",
        "FAKEGPU_DIST_MODE": "simulate",
        "FAKEGPU_COORDINATOR_TRANSPORT": "unix",
        "FAKEGPU_COORDINATOR_ADDR": socket,
        "FAKEGPU_COORDINATOR_TIMEOUT_MS": "240000",
        "FAKEGPU_REPORT_PATH": os.devnull,
        "FAKEGPU_UNSUPPORTED_API": "error",  # every kernel launch is an error; by default it would do nothing
        "TORCHDYNAMO_DISABLE": "1",  # compiled code would be kernels
        "OMP_NUM_THREADS": "1",
    }


def on_gpus(function: Callable[..., Any], count: int, *args: Any, timeout: float = 600.0, **more: str) -> list[Any]:
    """Run `function(*args)` on `count` ranks with a fake GPU each, over ProcessGroupNCCL; return their results. See
    `run_ranks`."""
    with fake_gpus(count, **more) as variables:
        return run_ranks(function, count, *args, timeout=timeout, env=variables, start="spawn")


@dataclass
class TestRun:
    """Outcomes of a run of pytest, by test. `output` is what pytest has printed."""

    __test__ = False  # pytest would collect it by its name
    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # test -> reason
    failed: dict[str, str] = field(default_factory=dict)  # test -> message
    output: str = ""


def run_tests(words: list[str], count: int, timeout: float = 3000.0) -> TestRun:
    """Run pytest with these arguments in a process that sees `count` fake GPUs."""
    with fake_gpus(count) as variables, tempfile.TemporaryDirectory(prefix="fake_gpu_") as place:
        report = Path(place, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        command += [f"--timeout={TEST_SECONDS}", *words]
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
        done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, timeout=timeout, **options)
        found = TestRun(output=done.stdout)
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            name, results = case.get("name", ""), {child.tag: child.get("message", "") for child in case}
            if "skipped" in results:
                found.skipped[name] = results["skipped"]
            elif problem := results.get("failure") or results.get("error"):
                found.failed[name] = problem
            else:
                found.passed.append(name)
    if done.returncode and not found.failed:
        found.failed["pytest"] = f"exit code {done.returncode}"
    return found
