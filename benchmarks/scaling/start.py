"""The rendezvous of light processes that start as ranks do, with the real launcher (`rendezvous.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.rendezvous import measure
from benchmarks.scaling.table import Point, Series

WORLDS = (16, 64, 128)  # `rendezvous.py` goes on to 1,024, in minutes on two cores


def series() -> Iterator[Series]:
    """Yield the time until all ranks have joined the world, and the memory of a rank."""
    joined = Series("start", "all ranks have joined the world", "ranks")
    for ranks in WORLDS:
        start = measure(ranks)
        joined.points.append(Point(ranks, start.joined, start.private_mb * 1e6))
    joined.note = "all processes share this machine's cores; the bytes are a rank's own memory, without the model"
    yield joined
