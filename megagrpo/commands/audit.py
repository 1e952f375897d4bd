"""Recomputes a dumped step of a run in float64, and names the first number that differs.

    megagrpo audit runs/quickstart --step 2

`debug.dump_steps` tells a run which steps to dump (docs/audit.md). Exit code 0: every quantity is within its tolerance,
1: one is not, 2: there is no such dump.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import show
from megagrpo.proof.audit.tolerances import TOLERANCES

EPILOG = """Tolerances by the run's precision, times the number itself where that is above 1 (log-probs, entropy, KL in
nats; the loss relative to its tokens' mean absolute value; the gradient's norm relative; `tensor`: the gradient of one
tensor). Tokens, masks and denominators are exact. Numbers that the run stores or sums in float32 may differ by 1e-6 and
1e-5.

""" + "\n".join(
    f"  {dtype:8}  token {t.token:g}  average {t.average:g}  loss {t.loss:g}  norm {t.grad_norm:g}  tensor "
    f"{t.gradient:g}"
    for dtype, t in TOLERANCES.items()
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo audit`."""
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="folder of the run")
    add("--step", type=int, required=True, metavar="N", help="the dumped step")
    add("--model", type=Path, metavar="FOLDER", help="where the model lies now from which the run started")
    add("--json", action="store_true", help="print JSON")
    parser.epilog = EPILOG


def run(options: argparse.Namespace) -> int:
    """Audit one step, and return the exit code. Raises ConfigError for a missing dump."""
    with without_garbage_collection():
        from transformers.utils.logging import disable_progress_bar

        from megagrpo.proof.audit.audit_checks import check_step
        from megagrpo.proof.audit.audit_compare import as_json, as_text
        from megagrpo.proof.audit.saved import load_step
    disable_progress_bar()
    step = load_step(options.folder, options.step, options.model)
    checks = list(check_step(step))
    show(json.dumps(as_json(step, checks), indent=1) if options.json else as_text(step, checks))
    return 0 if all(check.passed for check in checks) else 1
