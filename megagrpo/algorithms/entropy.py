"""Entropy as an option of the loss: a bonus for exploration, its adaptive weight, and the tokens worth training on.

Entropies are of the policy's distribution at the sampling temperature, in nats, one per loss token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megagrpo.config import AlgorithmSection
from megagrpo.train_types import TrainState

TIE = 1e-5  # nats: entropies that differ by less are equal up to the rounding of a layout


def threshold_of_top(entropies: Tensor, share: float, all_reduce: AllReduce = lambda values, _: values) -> float:
    """The entropy that the top `share` of tokens reach: the (1 - share) quantile of `entropies` [N] of all ranks that
    `all_reduce` reduces over; NaN if there are none. Wang et al. 2025, "Beyond the 80/20 rule", arXiv 2506.01939; TRL's
    `top_entropy_quantile`."""
    return quantile(entropies, 1 - share, all_reduce)


def reach_top(entropies: Tensor, threshold: float) -> Tensor:
    """[N] bool: which tokens are in the top share by its threshold. Tokens that tie at the threshold are all in it, as
    first tokens of responses to one prompt do, so that every layout counts the same tokens."""
    return entropies >= threshold - TIE


def bonus_coefficient(state: TrainState, algorithm: AlgorithmSection) -> float:
    """The weight of the bonus in the coming optimizer step. An adaptive one waits until a step had no more entropy than
    the target."""
    if not algorithm.use_adaptive_entropy:
        return algorithm.entropy_coef
    low = state.last_entropy is not None and state.last_entropy <= algorithm.entropy_target
    return _adaptive(state, algorithm) if low else 0.0


def adapt_bonus(state: TrainState, metrics: dict[str, float], algorithm: AlgorithmSection) -> None:
    """Move an adaptive weight in `state`, within its bounds, after an optimizer step with these metrics. It moves one
    delta up if the mean entropy of the tokens that the bonus counts is at most the target, else one down (Skywork-OR1,
    He et al. 2025, arXiv 2505.22312). A step without such tokens or finite entropy changes nothing."""
    entropy = metrics.get("entropy" if algorithm.top_entropy_quantile == 1 else "entropy/top", math.nan)
    if not algorithm.use_adaptive_entropy or not math.isfinite(entropy):
        return
    if entropy <= algorithm.entropy_target:
        state.entropy_coef = min(_adaptive(state, algorithm) + algorithm.entropy_coef_delta, algorithm.entropy_coef_max)
    else:
        state.entropy_coef = max(_adaptive(state, algorithm) - algorithm.entropy_coef_delta, algorithm.entropy_coef_min)
    state.last_entropy = entropy


def _adaptive(state: TrainState, algorithm: AlgorithmSection) -> float:
    return algorithm.entropy_coef if state.entropy_coef is None else state.entropy_coef


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
