"""Sums the metrics of micro-batches and ranks; each metric says itself how (`train_types.Metric`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megagrpo.platform.parallel.layout import Layout
from megagrpo.train_types import Metric


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


class MetricsOfRanks:
    """Merges the metrics of all ranks, and their flags, in one message of a fixed size: a row per known name.

    A rank that has a new name broadcasts its names first: in the first step, and when a loss measures something new.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._empty: dict[str, Metric] = {}  # each known name with an empty metric of its kind; equal on all ranks

    def merge(self, mine: dict[str, Metric], *flags: bool) -> tuple[dict[str, Metric], list[bool]]:
        """Return all ranks' metrics, on the host, merged by name, and whether any rank has set each flag. Collective.

        Names are in the order in which they became known. The bits are those of `merged` for up to two ranks that have
        a metric. With more of them the last bit of a sum may differ: the sums are added up as a tree.
        """
        world_size, rank = self._layout.world_size, self._layout.world_rank
        while True:
            has_news = world_size - rank if mine.keys() - self._empty.keys() else 0  # largest on the first such rank
            rows = [(float(number), 0.0, 1.0) for number in (has_news, *flags)]
            kinds = [Metric(0.0, reduce="max")] * len(rows) + list(self._empty.values())
            rows += [_row(mine.get(name)) for name in self._empty]
            reduced = self._layout.all_reduce(torch.tensor(rows, dtype=torch.float64), partial(_both, kinds)).tolist()
            first, *raised = (row[0] for row in reduced[: 1 + len(flags)])
            if not first:
                break
            own = {name: Metric(0.0, 0.0, metric.reduce) for name, metric in mine.items()}
            told = self._layout.broadcast_object(own, world_size - int(first))
            self._empty |= {name: empty for name, empty in told.items() if name not in self._empty}
        of_names = zip(self._empty.items(), reduced[1 + len(flags) :], strict=True)
        everyone = {name: Metric(row[0], row[1], empty.reduce) for (name, empty), row in of_names if row[2]}
        return everyone, [bool(flag) for flag in raised]


def _row(metric: Metric | None) -> tuple[float, float, float]:
    """Return (sum, count, 1) of a metric on the host; zeros for one that this rank does not have."""
    return (0.0, 0.0, 0.0) if metric is None else (float(metric.sum), float(metric.count), 1.0)


def _both(kinds: Sequence[Metric], lower: Tensor, upper: Tensor) -> Tensor:
    """Merge the `_row`s [metrics, 3] of metrics of these kinds."""
    rows = []
    for kind, one, other in zip(kinds, lower.tolist(), upper.tolist(), strict=True):
        if one[2] and other[2]:
            first, second = (Metric(total, count, kind.reduce) for total, count, _ in (one, other))
            rows.append(_row(first.merge(second)))
        else:
            rows.append(one if one[2] else other)
    return torch.tensor(rows, dtype=torch.float64)
