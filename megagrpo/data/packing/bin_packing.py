"""Fills bins with bundles of tokens, the longest first, each into the emptiest bin, by arithmetic on whole arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def least_bins(lengths: np.ndarray, budget: int) -> int:
    """Return a lower bound for the number of bins, so that few attempts suffice. It is the largest of two kinds:

    - Martello and Toth's L2, for each small size t: bundles over half the budget share no bin, and those of t to half
      of it fill the room beside them, except in bins whose bundle leaves less than t.
    - For each k below 64: at most k bundles over budget / (k + 1) share a bin.
    """
    ordered = np.sort(lengths)
    total = np.concatenate([[0], ordered.cumsum()])
    half = np.searchsorted(ordered, budget // 2, side="right")
    t = np.concatenate([[0], ordered[:half]])
    start, alone = np.searchsorted(ordered, t), np.searchsorted(ordered, budget - t, side="right")
    room = (alone - half) * budget - (total[alone] - total[half])
    beside = max(0, -int(-(total[half] - total[start] - room).max() // budget))
    k = np.arange(1, 64)
    counts = len(lengths) - np.searchsorted(ordered, budget // (k + 1), side="right")
    return max(len(lengths) - int(half) + beside, int((-(-counts // k)).max()))


def fill_emptiest(lengths: np.ndarray, num_bins: int, budget: int) -> np.ndarray | None:
    """Return the bin [B] of each bundle, or None if one does not fit. The `lengths` [B] descend, and each bundle goes
    into the emptiest bin, of two equal ones into the first.

    A round serves many bundles at once: the i-th one goes into the i-th emptiest bin, until one of the bins just filled
    is at most as full as the next. A bin is one integer, load * num_bins + number, so that sorting orders bins by both.
    """
    bins, sorted_bins, start = np.empty(lengths.size, dtype=np.int64), np.arange(num_bins), 0
    while start < lengths.size:
        added = lengths[start : start + num_bins]
        loads, numbers = np.divmod(sorted_bins[: added.size], num_bins)
        filled = loads + added
        overtaken = np.minimum.accumulate(filled)[:-1] <= loads[1:]
        count = int(overtaken.argmax()) + 1 if overtaken.any() else added.size
        if filled[:count].max() > budget:
            return None
        bins[start : start + count] = numbers[:count]
        sorted_bins[:count] = filled[:count] * num_bins + numbers[:count]
        sorted_bins.sort()
        start += count
    return bins


def imbalance(loads: Sequence[int]) -> float:
    """Return the largest over the mean number of tokens. 1.0 is perfect balance, and the result without any tokens."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
