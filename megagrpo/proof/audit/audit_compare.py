"""Compares one quantity of a dump with its recomputed value, within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.proof.audit.saved import DumpedUpdate, Step

EXACT = 0.0
ROUNDING = 1e-6  # tolerance of one number stored in float32
SUMMING = 1e-5  # tolerance of a mean of many numbers


@dataclass(frozen=True)
class Check:
    """The result of one comparison: the number of values, and the value furthest beyond its tolerance.

    For that value it holds the place, both values, their difference and the allowed difference. `average` is the mean
    difference, with its limit if there is one. `note` names the method where there are several.
    """

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
    locate: Callable[[int], str],
    size: float = 1.0,
    average: float | None = None,
    note: str = "",
) -> Check:
    """Compare numbers pairwise.

    The allowed difference is `tolerance` times `size`, or times the recomputed number if larger. A tensor of tolerances
    [n] is the allowed difference itself. `average` limits the mean difference. NaN equals only NaN.
    """
    measured, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (dumped, recomputed))
    if not expected.numel():
        return Check(quantity, 0, True, 0.0, 0.0 if isinstance(tolerance, Tensor) else tolerance * size, note=note)
    difference = torch.where(
        (measured == expected) | (measured.isnan() & expected.isnan()), 0.0, (measured - expected).abs()
    ).nan_to_num(nan=math.inf)
    if isinstance(tolerance, Tensor):
        allowed = tolerance.double().nan_to_num(nan=0.0)
    else:
        allowed = tolerance * torch.clamp(expected.abs(), min=size).nan_to_num(nan=size, posinf=size)
    worst = int((difference - allowed).argmax())
    mean = difference.mean().item()
    passed = bool((difference <= allowed).all()) and (average is None or mean <= average)
    values = (
        difference[worst].item(),
        allowed[worst].item(),
        locate(worst),
        measured[worst].item(),
        expected[worst].item(),
    )
    return Check(quantity, expected.numel(), passed, *values, mean, average, note)


def named(quantity: str, step: Step, update: DumpedUpdate) -> str:
    """Return the quantity's name, with the number of the optimizer step if the dumped step has several."""
    return quantity if len(step.updates) == 1 else f"{quantity}, optimizer step {update.number}"
