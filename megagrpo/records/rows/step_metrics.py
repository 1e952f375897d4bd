"""The metrics of a step: their reduction over its optimizer steps, and the shares of idle time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from megagrpo.train_types import AGREEMENT, Metric

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    """Return name -> value."""
    return {name: metric.value for name, metric in metrics.items()}


def reduce_updates(updates: Sequence[dict[str, Metric]]) -> dict[str, float]:
    """Reduce the metrics of several optimizer steps by `Metric.reduce`. A metric may be absent from some of them."""
    by_name: dict[str, list[Metric]] = {}
    for update in updates:
        for name, metric in update.items():
            by_name.setdefault(name, []).append(metric)
    return {
        name: _REDUCTIONS[metrics[0].reduce]([metric.value for metric in metrics]) for name, metrics in by_name.items()
    }


def split_layers(metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the metrics of a step without those of single layers, and these as `routing/agreement_by_layer`: layer ->
    share. Trackers draw a chart for each name, and a model has up to a hundred layers."""
    of_layers = {name: name.removeprefix(f"{AGREEMENT}/") for name in metrics if name.startswith(f"{AGREEMENT}/")}
    by_layer = {f"{AGREEMENT}_by_layer": {layer: metrics[name] for name, layer in of_layers.items()}}
    return {n: v for n, v in metrics.items() if n not in of_layers}, by_layer if of_layers else {}


def idle_shares(times: dict[str, float]) -> dict[str, float]:
    """Return `idle/trainer`, the share of a step that waits for responses and rewards, and `idle/servers`, the share
    without generation. `times` has `time/step` and its phases in seconds. Valid for synchronous runs only."""
    step, generating = times["time/step"], times.get("time/generate", 0.0)
    return {"idle/trainer": (generating + times.get("time/reward", 0.0)) / step, "idle/servers": 1 - generating / step}
