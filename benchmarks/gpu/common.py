"""Shared code of the benchmarks in this folder: times and memory on a GPU, the chip's measured ceilings, tables."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megagrpo.platform import device


@dataclass(frozen=True)
class Ceilings:
    """The chip's measured ceilings: products of square matrices in TFLOP/s, a copy within its memory in GB/s (read plus
    written)."""

    bf16_tflops: float
    fp8_tflops: float | None
    copy_gbs: float

    def __str__(self) -> str:
        fp8 = "" if self.fp8_tflops is None else f", FP8 products {self.fp8_tflops:.0f} TFLOP/s"
        return (
            f"{torch.cuda.get_device_name()}: bf16 products {self.bf16_tflops:.0f} TFLOP/s{fp8}, device copy "
            f"{self.copy_gbs:.0f} GB/s"
        )


def seconds(function: Callable[[], object], repeats: int = 10, warm_up: int = 3) -> float:
    """Median seconds of a call on the GPU, by the GPU's clock."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes allocated at a call's peak, above the bytes allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_ceilings(size: int = 8192, copied: int = 2**31) -> Ceilings:
    """Measure products of square matrices of `size`, and a copy of `copied` bytes."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * size**3 / seconds(lambda: left @ right) / 1e12
    fp8 = None
    if torch.cuda.get_device_capability() >= (8, 9):
        scale = torch.ones((), device="cuda")
        left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        fp8 = (
            2
            * size**3
            / seconds(lambda: torch._scaled_mm(left8, right8, scale, scale, out_dtype=torch.bfloat16))
            / 1e12
        )
    source = torch.empty(copied, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return Ceilings(bf16, fp8, 2 * copied / seconds(lambda: target.copy_(source)) / 1e9)


def need_a_gpu() -> None:
    """End the program with a message if there is no GPU."""
    if not device.has_gpu():
        sys.exit("This benchmark needs a GPU; --dry-run prints what it would run.")


def show(rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first row is its header; the first column is text, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        print(
            "  ".join(
                [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))]
            ).rstrip()
        )
