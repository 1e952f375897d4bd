"""Sums the metrics of micro-batches and ranks; each metric says itself how (`types.Metric`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megagrpo.types import Metric


def on_host(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Copy all metrics of a micro-batch to the host in one transfer, as Python floats of float32 numbers."""
    numbers = [torch.as_tensor(number) for metric in metrics.values() for number in (metric.sum, metric.count)]
    values = torch.stack([number.detach().float().to(numbers[0].device) for number in numbers]).tolist()
    return {name: Metric(values[2 * i], values[2 * i + 1], metric.reduce) for i, (name, metric) in enumerate(metrics.items())}


def merged(parts: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics by name, in the order of `parts`."""
    total: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name].merge(metric) if name in total else metric
    return total
