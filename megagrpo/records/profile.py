"""Profiles single steps (`run.profile`): a torch profiler trace, ranges for Nsight Systems, or a GPU memory snapshot.

A step's phases are ranges in the profile: `Phases.mark` is `Profiler.mark`. docs/profiling.md explains the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from megagrpo.config import Problem, ProblemError, ProfileSection


def check_profile(profile: ProfileSection, has_gpu: bool) -> None:
    """Raise ProblemError when this machine cannot make the profile."""
    if profile.steps and profile.tool != "torch" and not has_gpu:
        raise ProblemError(
            Problem(("run.profile.tool",), f"{profile.tool} needs a GPU, and this machine has none; set it to torch")
        )


class Profiler:
    """Profiles this rank's part of the steps that `run.profile` names. `say` prints a line for the user."""

    def __init__(self, profile: ProfileSection, run_folder: Path, rank: int, say: Callable[[str], None]):
        self._profile, self._rank, self._say = profile, rank, say
        self._folder = run_folder / "profile"
        self._runs = False

    def mark(self, name: str) -> AbstractContextManager[object]:
        """Return a context that names a range in the profile; it does nothing outside of profiled steps."""
        if not self._runs:
            return nullcontext()
        return RECORDERS[self._profile.tool].mark(name)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the step inside the context, if it is one of `run.profile.steps`. An error inside leaves no files."""
        if step not in self._profile.steps or (self._profile.ranks and self._rank not in self._profile.ranks):
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        recorder, stem = RECORDERS[self._profile.tool], self._folder / f"step_{step:06d}_rank_{self._rank}"
        with recorder.record(stem) as path:
            self._runs = True
            try:
                with self.mark(f"step {step}"):
                    yield
            finally:
                self._runs = False
        if path is not None:
            self._say(f"profile of step {step}: {path.relative_to(self._folder.parent)}")


TOP_OPERATIONS = 40  # rows of the table of operations
MEMORY_EVENTS = 200_000  # allocations and frees that a snapshot keeps


@dataclass(frozen=True)
class Recorder:
    """`record(stem)` records while its context is open, and yields the main file that it writes, whose name begins with
    `stem`; None when another process writes it. `mark(name)` names a range inside."""

    record: Callable[[Path], AbstractContextManager[Path | None]]
    mark: Callable[[str], AbstractContextManager[object]]


@contextmanager
def _torch_trace(stem: Path) -> Iterator[Path]:
    """Record with torch's profiler: a trace for Perfetto or chrome://tracing and a table of the longest operations."""
    path = stem.with_name(f"{stem.name}.trace.json.gz")
    has_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * has_gpu
    with torch.profiler.profile(activities=activities) as profiler:
        yield path
    profiler.export_chrome_trace(str(path))
    longest = "self_device_time_total" if has_gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=longest, row_limit=TOP_OPERATIONS)
    stem.with_name(f"{stem.name}.top.txt").write_text(table)


@contextmanager
def _nsys_range(stem: Path) -> Iterator[None]:
    """Let `nsys profile --capture-range=cudaProfilerApi` record; nsys writes the file."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


@contextmanager
def _memory_snapshot(stem: Path) -> Iterator[Path]:
    """Record allocations of GPU memory with their stacks. Writes a snapshot for https://pytorch.org/memory_viz."""
    path = stem.with_name(f"{stem.name}.memory.pickle")
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        yield path
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


RECORDERS = {
    "torch": Recorder(_torch_trace, torch.profiler.record_function),
    "nsys": Recorder(_nsys_range, torch.cuda.nvtx.range),
    "memory": Recorder(_memory_snapshot, torch.profiler.record_function),
}
