"""The control messages of a step: agreements, metrics and reports in a simulated world (`control_messages.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.control_messages import BETWEEN, INSIDE, LARGEST_RUN, table
from benchmarks.scaling.table import Point, Series


def series() -> Iterator[Series]:
    """Yield the time of a step's small all-reduces, and of the same messages as gathers of Python objects."""
    rows = table()
    latency = f"{1e6 * INSIDE:.0f} us within a node, {1e6 * BETWEEN:.0f} us between nodes"
    reduced = Series("control", "messages of a step", "ranks", note=f"{rows[0].messages} messages; latency {latency}")
    reduced.note += f"; ranks are threads up to {LARGEST_RUN:,}"
    gathered = Series("control", "the same as gathered objects", "ranks")
    for row in rows:
        reduced.points.append(Point(row.ranks, row.reduced, computed=not row.runs))
        gathered.points.append(Point(row.ranks, row.gathered, computed=True))
    yield from (reduced, gathered)
