"""The metrics of a step: their reduction over optimizer steps, the seconds of its phases, and idle time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megagrpo.types import Metric

_OVER_UPDATES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    """Return the metrics as numbers."""
    return {name: metric.value for name, metric in metrics.items()}


def over_updates(updates: Sequence[dict[str, Metric]]) -> dict[str, float]:
    """Combine the metrics of a step's optimizer steps, each as its `reduce` says, over those that report it."""
    by_name: dict[str, list[Metric]] = {}
    for update in updates:
        for name, metric in update.items():
            by_name.setdefault(name, []).append(metric)
    return {name: _OVER_UPDATES[metrics[0].reduce]([metric.value for metric in metrics]) for name, metrics in by_name.items()}


def idle_shares(times: dict[str, float]) -> dict[str, float]:
    """Return the shares of a step in which the trainer waits for responses and rewards, and in which the servers do not generate. Valid for
    synchronous runs, where the two take turns."""
    step, generating = times["time/step"], times.get("time/generate", 0.0)
    return {"idle/trainer": (generating + times.get("time/reward", 0.0)) / step, "idle/servers": 1 - generating / step}


class PhaseTimer:
    """Measures the seconds of each phase of a step: `with timer("generate"): ...`. Times of repeated phases are added up.

    The times are host times: work that a phase leaves queued on a GPU counts for the phase that waits for it.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """Return `time/PHASE` for each phase and `time/step`, in seconds since the last call or the start, and reset them."""
        now = time.perf_counter()
        metrics = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()} | {"time/step": now - self._started}
        self._seconds.clear()
        self._started = now
        return metrics
