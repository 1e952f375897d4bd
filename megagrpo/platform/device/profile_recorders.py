"""Recorders of a profile: torch's profiler, Nsight Systems, and the history of GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

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
