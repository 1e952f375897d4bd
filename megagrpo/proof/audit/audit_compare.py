"""Compares one dumped quantity with its recomputed value, within a tolerance. Shows a step's checks as text or JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megagrpo.proof.audit.saved import DumpedUpdate, Step

NO_TOLERANCE = 0.0
ROUNDING_TOLERANCE = 1e-6  # tolerance of one number stored in float32
SUMMING_TOLERANCE = 1e-5  # tolerance of a mean of many numbers


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
    apart, limit, place = difference[worst].item(), allowed[worst].item(), locate(worst)
    pair = measured[worst].item(), expected[worst].item()
    return Check(quantity, expected.numel(), passed, apart, limit, place, *pair, mean, average, note)


def named(check: Check, step: Step, update: DumpedUpdate) -> Check:
    """Return the check with the number of the optimizer step in its name if the dumped step has several."""
    if len(step.updates) == 1:
        return check
    return replace(check, quantity=f"{check.quantity}, optimizer step {update.number}")


def as_json(step: Step, checks: Iterable[Check]) -> dict[str, Any]:
    """Return verdict, first difference and every check; infinity and NaN as text."""
    rows = [
        {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(check).items()}
        for check in checks
    ]
    first = next((row for row in rows if not row["passed"]), None)
    return {
        "dump": str(step.folder),
        "precision": step.dtype,
        "passed": first is None,
        "first_difference": first,
        "checks": rows,
    }


def as_text(step: Step, checks: list[Check]) -> str:
    """Return one line for every quantity, and the verdict."""
    tokens = sum(s.places.numel() for s in step.samples)
    layout = " x ".join(f"{axis} {size}" for axis, size in step.layout.items() if size > 1) or "one rank"
    width = max(len(check.quantity) for check in checks)
    lines = [
        f"{step.folder}: {len(step.samples)} samples, {tokens} response tokens, {step.dtype} on {layout}, beside "
        "float64",
        f"  {'quantity':{width}}  numbers  largest difference  allowed  average  allowed  where",
    ]
    for check in checks:
        mark, allowed = " " if check.passed else "!", f"{check.allowed:.1e}" if check.allowed else "exact"
        remarks = [check.place if check.difference else "", f"({check.note})" if check.note else ""]
        line = (
            f"{mark} {check.quantity:{width}}  {check.count:7d}  {check.difference:18.1e}  {allowed:>7}  "
            f"{' '.join(filter(None, remarks))}"
        )
        lines.append(line.rstrip())
    return "\n".join([*lines, verdict(checks)])


def verdict(checks: Iterable[Check]) -> str:
    """Return one line: all quantities agree, or the first that differs."""
    first = next((check for check in checks if not check.passed), None)
    if first is None:
        return "agrees: every quantity is within its tolerance"
    place = f" at {first.place}" if first.place else ""
    if isinstance(first.dumped, str):
        return f"differs first in {first.quantity}{place}: {first.dumped} ({first.difference:g} such)"
    if first.difference <= first.allowed:
        return (
            f"differs first in {first.quantity}: by {first.average:.2e} on average where {first.average_allowed:.1e} "
            "is allowed"
        )
    return (
        f"differs first in {first.quantity}{place}: the run has {first.dumped:.9g}, float64 has "
        f"{first.recomputed:.9g}, off by {first.difference:.2e} where {first.allowed:.1e} is allowed"
    )
