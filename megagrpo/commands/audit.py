"""`megagrpo audit RUN --step N`: checks whether a run computed a step as the formulas say."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from transformers.utils.logging import disable_progress_bar

from megagrpo.audit.checks import check_step
from megagrpo.audit.compare import TOLERANCES, Check
from megagrpo.audit.saved import Step, load_step
from megagrpo.config import ConfigError
from megagrpo.process.terminal import show

USAGE = """\
megagrpo audit RUN --step N [--json] [--model FOLDER]    recompute a dumped step in float64 and name the first number that differs

RUN is the run's folder; `debug.dump_steps` tells a run what to dump. --model says where the model that the run started from lies now.
Exit code 0: every quantity is within its tolerance; 1: one is not; 2: there is no such dump.

Tolerances by the run's precision, times the number itself where that is above 1 (log-probs, entropy, KL in nats; the loss relative to its
tokens' mean absolute value; the gradient norm relative). Tokens, masks and denominators are exact, what is stored or summed in float32
may be off by 1e-6 and 1e-5.
""" + "\n".join(
    f"  {dtype:8}  one token {t.token:g}  average {t.average:g}  loss {t.loss:g}  gradient norm {t.grad_norm:g}  of a tensor {t.gradient:g}"
    for dtype, t in TOLERANCES.items()
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n\n{USAGE}")


def main(arguments: list[str]) -> int:
    """Run `megagrpo audit` and return its exit code. Raises ConfigError for a wrong command line and for a missing dump."""
    parser = _Parser(prog="megagrpo audit", add_help=False)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.help:
        print(USAGE)
        return 0
    if parsed.run is None or parsed.step is None:
        parser.error("audit needs the folder of a run and --step")
    disable_progress_bar()
    step = load_step(parsed.run, parsed.step, parsed.model)
    checks = list(check_step(step))
    if parsed.json:
        print(json.dumps(as_json(step, checks), indent=1))
    else:
        show(as_text(step, checks))
    return 0 if all(check.passed for check in checks) else 1


def as_json(step: Step, checks: Iterable[Check]) -> dict[str, Any]:
    """Return verdict, first difference and every check; infinity and NaN as text."""
    rows = [{k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(check).items()} for check in checks]
    first = next((row for row in rows if not row["passed"]), None)
    return {"dump": str(step.folder), "precision": step.dtype, "passed": first is None, "first_difference": first, "checks": rows}


def as_text(step: Step, checks: list[Check]) -> str:
    """Return one line for every quantity, and the verdict."""
    tokens = sum(s.places.numel() for s in step.samples)
    layout = " x ".join(f"{axis} {size}" for axis, size in step.layout.items() if size > 1) or "one rank"
    width = max(len(check.quantity) for check in checks)
    lines = [
        f"{step.folder}: {len(step.samples)} samples, {tokens} response tokens, {step.dtype} on {layout}, beside float64",
        f"  {'quantity':{width}}  numbers  largest difference  allowed  average  allowed  where",
    ]
    for check in checks:
        mark, allowed = " " if check.passed else "!", f"{check.allowed:.1e}" if check.allowed else "exact"
        remarks = [check.place if check.difference else "", f"({check.note})" if check.note else ""]
        line = (
            f"{mark} {check.quantity:{width}}  {check.count:7d}  {check.difference:18.1e}  {allowed:>7}  {' '.join(filter(None, remarks))}"
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
        return f"differs first in {first.quantity}: by {first.average:.2e} on average where {first.average_allowed:.1e} is allowed"
    return (
        f"differs first in {first.quantity}{place}: the run has {first.dumped:.9g}, float64 has {first.recomputed:.9g}, "
        f"off by {first.difference:.2e} where {first.allowed:.1e} is allowed"
    )
