"""Repeated steps of a benchmark: when the warm-up ends, and the median of the steps after it with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

AGREEMENT = 0.03  # two steps agree if the longer one takes at most this share more than the shorter one
MOST_WARM_UPS = 8
RULE = f"warm-up until two steps in a row agree to {AGREEMENT:.0%} in CPU time (at most {MOST_WARM_UPS} steps)"


def is_warm(seconds: Sequence[float]) -> bool:
    """Whether the warm-up is over after steps of these CPU seconds: the last two agree, or there were enough."""
    if len(seconds) < 2:
        return False
    return len(seconds) >= MOST_WARM_UPS or max(seconds[-2:]) <= (1 + AGREEMENT) * min(seconds[-2:])


def warm_up_text(seconds: Sequence[float]) -> str:
    """Return the number of warm-up steps of these CPU seconds as text, with a mark if the last two do not agree."""
    agree = max(seconds[-2:]) <= (1 + AGREEMENT) * min(seconds[-2:])
    return f"{len(seconds)}" if agree else f"{len(seconds)}!"


def spread(values: Sequence[float]) -> float:
    """Return the distance between the largest and the smallest value over the median."""
    return (max(values) - min(values)) / statistics.median(values)


def with_range(values: Sequence[float]) -> str:
    """Return the median with the smallest and the largest value, as text."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
