"""Shows the checks of a step as text or as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from megagrpo.proof.audit.audit_compare import Check
from megagrpo.proof.audit.saved import Step


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
        f"float64",
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
            f"differs first in {first.quantity}: by {first.average:.2e} on average where "
            f"{first.average_allowed:.1e} is allowed"
        )
    return (
        f"differs first in {first.quantity}{place}: the run has {first.dumped:.9g}, float64 has "
        f"{first.recomputed:.9g}, off by {first.difference:.2e} where {first.allowed:.1e} is allowed"
    )
