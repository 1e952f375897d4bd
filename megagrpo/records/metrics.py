"""The metrics of a step: their reduction over optimizer steps, the seconds of its phases, and idle time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

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
    return {
        name: _OVER_UPDATES[metrics[0].reduce]([metric.value for metric in metrics])
        for name, metrics in by_name.items()
    }


def idle_shares(times: dict[str, float]) -> dict[str, float]:
    """Return the shares of a step in which the trainer waits for responses and rewards, and in which the servers do not
    generate. Valid for synchronous runs, where the two take turns."""
    step, generating = times["time/step"], times.get("time/generate", 0.0)
    return {"idle/trainer": (generating + times.get("time/reward", 0.0)) / step, "idle/servers": 1 - generating / step}
