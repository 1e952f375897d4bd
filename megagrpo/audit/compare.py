"""One quantity of a dump beside its recomputed twin, and how far apart they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.audit.saved import Step, Update

EXACT = 0.0
ROUNDING = 1e-6  # of one number stored in float32
SUMMING = 1e-5  # of the mean of many


@dataclass(frozen=True)
class Tolerances:
    """How far a run may be from float64: log-probs, entropy and exact KL of one token, and on average over tokens, in nats; the loss
    relative to its tokens' mean absolute value; the gradient norm relative; the gradient of one tensor relative, in the Euclidean norm."""

    token: float
    average: float
    loss: float
    grad_norm: float
    gradient: float


TOLERANCES = {
    "float32": Tolerances(token=2e-4, average=2e-5, loss=2e-5, grad_norm=1e-4, gradient=2e-3),
    "bfloat16": Tolerances(token=0.5, average=0.1, loss=0.02, grad_norm=0.05, gradient=0.5),
}


@dataclass(frozen=True)
class Check:
    """One quantity: how many numbers were compared, and of the one that is furthest off (by its tolerance) the place, both values, their
    difference and what was allowed; the `average` difference, and what was allowed where it is limited too. `note` says how it was
    compared where that is a choice."""

    quantity: str
    count: int
    passed: bool
    difference: float
    allowed: float
    place: str = ""
    dumped: float | str = 0.0
    recomputed: float | str = 0.0
    average: float = 0.0
    average_allowed: float | None = None
    note: str = ""


def compare(
    quantity: str,
    dumped: Sequence[float] | Tensor,
    recomputed: Sequence[float] | Tensor,
    tolerance: float | Tensor,
    place: Callable[[int], str],
    size: float = 1.0,
    average: float | None = None,
    note: str = "",
) -> Check:
    """Numbers pairwise. Allowed is `tolerance` times `size`, or times the recomputed number where that is larger; a
    tensor of tolerances [n] is what is allowed itself. `average` limits the mean difference. NaN equals NaN only."""
    found, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (dumped, recomputed))
    if not expected.numel():
        return Check(quantity, 0, True, 0.0, 0.0 if isinstance(tolerance, Tensor) else tolerance * size, note=note)
    difference = torch.where((found == expected) | (found.isnan() & expected.isnan()), 0.0, (found - expected).abs()).nan_to_num(
        nan=math.inf
    )
    if isinstance(tolerance, Tensor):
        allowed = tolerance.double().nan_to_num(nan=0.0)
    else:
        allowed = tolerance * torch.clamp(expected.abs(), min=size).nan_to_num(nan=size, posinf=size)
    worst = int((difference - allowed).argmax())
    mean = difference.mean().item()
    passed = bool((difference <= allowed).all()) and (average is None or mean <= average)
    values = difference[worst].item(), allowed[worst].item(), place(worst), found[worst].item(), expected[worst].item()
    return Check(quantity, expected.numel(), passed, *values, mean, average, note)


def named(quantity: str, step: Step, update: Update) -> str:
    """The quantity with the number of the optimizer step, where the dumped step has several."""
    return quantity if len(step.updates) == 1 else f"{quantity}, optimizer step {update.number}"
