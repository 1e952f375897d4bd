"""Quantiles of numbers that lie on many ranks, without moving the numbers: a radix select by histograms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

AllReduce = Callable[[Tensor, Literal["sum", "min"]], Tensor]

KEY_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of a float32's digits, the highest first


def quantile(values: Tensor, fraction: float, all_reduce: AllReduce) -> float:
    """Return the quantile of all ranks' `values` [N] float32, linear between neighbors; NaN if there are none.

    It has the bits of a sort of all values: the histogram of each digit, among the values that share the digits before,
    gives a digit of the lower neighbor. Four messages of at most 16 KiB, for any N. NaN is the largest value.
    """
    keys = _sortable(values)
    lower, place, weight, inside = 0, 0, 0.0, keys
    for shift, bits in KEY_DIGITS:
        counts = all_reduce((inside >> shift & (1 << bits) - 1).bincount(minlength=1 << bits), "sum")
        if shift == KEY_DIGITS[0][0]:
            position = fraction * max(int(counts.sum()) - 1, 0)
            place, weight = math.floor(position), position - math.floor(position)
            if not counts.any():
                return math.nan
        up_to = counts.cumsum(0)
        digit = int((up_to <= place).sum())
        place -= int(up_to[digit] - counts[digit])
        lower |= digit << shift
        inside = inside[inside >> shift == lower >> shift]
    largest = torch.tensor([2**32])
    above = int(all_reduce(torch.cat([keys[keys > lower], largest]).min(), "min"))
    upper = lower if place + 1 < counts[digit] or above == 2**32 else above
    return _value(lower).lerp(_value(upper), weight).item()


def _sortable(values: Tensor) -> Tensor:
    """Return [N] int64 from 0 to 2^32 - 1 in the order of `values` [N] float32."""
    bits = torch.where(values.isnan(), math.nan, values.float()).view(torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() + 2**31


def _value(key: int) -> Tensor:
    """Return the float32 number of a key of `_sortable`."""
    bits = torch.tensor(key - 2**31, dtype=torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(torch.float32)
