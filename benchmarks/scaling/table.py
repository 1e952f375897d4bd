"""Points of the scale benchmark, their slopes, the printed table and the plot."""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """One size of a series. `seconds` and `bytes` are None if they were not measured. A `computed` point was not run:
    its numbers follow from measured seconds and bytes."""

    size: int
    seconds: float | None = None
    bytes: float | None = None
    computed: bool = False


@dataclass
class Series:
    """The points of one kind of work. `part` is the subject, `unit` is what `size` counts, `note` follows the table."""

    part: str
    what: str
    unit: str
    points: list[Point] = field(default_factory=list)
    note: str = ""

    @property
    def measured(self) -> list[Point]:
        """The points that were run, smallest first."""
        return sorted((point for point in self.points if not point.computed), key=lambda point: point.size)

    @property
    def slope(self) -> float | None:
        """The slope of log seconds against log size over the measured points: 1 is linear. None with one size."""
        points = [point for point in self.measured if point.seconds]
        return fitted_slope([point.size for point in points], [point.seconds or 0.0 for point in points])

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Series:
        """Return the series from its fields."""
        return Series(**data | {"points": [Point(**point) for point in data["points"]]})


def fitted_slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the slope of the least-squares line through (log size, log value); None without two sizes."""
    if len(set(sizes)) < 2:
        return None
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)


def best_seconds(work: Callable[[], object], least: float = 0.2, most: int = 5) -> float:
    """Return the least wall seconds of several calls: until they take `least` seconds together, at most `most` calls.

    Garbage is collected before and not during a call, so that the objects of other series do not count.
    """
    taken: list[float] = []
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        while len(taken) < most and sum(taken) < least:
            begun = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begun)
    finally:
        if enabled:
            gc.enable()
    return min(taken)


def cpu_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall seconds of `work`, and the CPU seconds of this process meanwhile."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def peak_bytes() -> int:
    """Return the largest resident memory of this process since its start, or since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> int:
    """Set the peak of `peak_bytes` to the memory that is resident now, and return it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


HEADER = "| part | what | size | seconds | bytes | slope | |\n|---|---|---|---|---|---|---|"


def lines_of(series: Series) -> list[str]:
    """Return the table's lines of a series: one per point, with the slope on the last measured one."""
    lines = []
    last = series.measured[-1] if series.measured else None
    for point in series.points:
        slope = series.slope if point is last else None
        cells = (
            series.part,
            series.what,
            f"{point.size:,} {series.unit}",
            "" if point.seconds is None else seconds_text(point.seconds),
            "" if point.bytes is None else bytes_text(point.bytes),
            "" if slope is None else f"{slope:.2f}",
            "computed" if point.computed else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def seconds_text(value: float) -> str:
    """Return seconds with three digits, in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:,.3g} {unit}" if value / scale < 1000 else f"{value / scale:,.0f} {unit}"
    return f"{value * 1e6:.3g} us"


def bytes_text(value: float) -> str:
    """Return bytes with three digits, in powers of 1,000."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def draw(all_series: Iterable[Series], path: Path) -> None:
    """Write an SVG: seconds against samples, and bytes and seconds against ranks. Hollow points are computed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scale"  # the same picture from the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not the outlines of its letters
    from matplotlib import pyplot

    panels = (("samples", "seconds"), ("ranks", "seconds"), ("ranks", "bytes"))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(14, 8), layout="constrained")
    kept = list(all_series)
    for axis, (unit, value) in zip(axes, panels, strict=True):
        shown = [series for series in kept if series.unit == unit and any(getattr(p, value) for p in series.points)]
        for number, series in enumerate(shown):
            points = sorted((p for p in series.points if getattr(p, value)), key=lambda point: point.size)
            color = pyplot.get_cmap("tab20")(number % 20)
            sizes, values = [p.size for p in points], [getattr(p, value) for p in points]
            axis.plot(sizes, values, color=color, linewidth=1, label=f"{series.part}: {series.what}")
            for point in points:
                face = "white" if point.computed else color
                axis.plot(point.size, getattr(point, value), "o", color=color, markerfacecolor=face, markersize=5)
        axis.set(xscale="log", yscale="log", xlabel=unit, ylabel=value, title=f"{value} against {unit}")
        axis.grid(alpha=0.3)
        if shown:
            axis.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.suptitle("One step's own work; hollow points are computed, not run", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
