"""Sums the metrics of micro-batches and ranks; each metric says itself how (`types.Metric`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.types import Metric


def on_host(parts: Sequence[dict[str, Metric]], *flags: Tensor) -> tuple[list[dict[str, Metric]], list[list[bool]]]:
    """Copy micro-batches' metrics and `flags`, any number of [n] bool tensors, to the host in one transfer per device.

    The metrics become Python floats of float32 numbers. Numbers that are on the host already are not transferred.
    """
    rows = [
        torch.as_tensor(number) for part in parts for metric in part.values() for number in (metric.sum, metric.count)
    ]
    values = iter(_numbers([row.detach().reshape(1) for row in rows] + list(flags)))
    host = [
        {name: Metric(next(values)[0], next(values)[0], metric.reduce) for name, metric in part.items()}
        for part in parts
    ]
    return host, [[bool(value) for value in flag] for flag in values]


def _numbers(rows: Sequence[Tensor]) -> list[list[float]]:
    """Return the float32 numbers of tensors [n], with one transfer for each device."""
    found: list[list[float]] = [[] for _ in rows]
    for device in {row.device for row in rows}:
        there = [(index, row) for index, row in enumerate(rows) if row.device == device]
        values = iter(torch.cat([row.float() for _, row in there]).tolist())
        for index, row in there:
            found[index] = list(itertools.islice(values, row.numel()))
    return found


def merged(parts: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics by name, in the order of `parts`."""
    total: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name].merge(metric) if name in total else metric
    return total
