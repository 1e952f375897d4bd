"""Compares a run's parallel layouts with one process, on a shrunken copy of its model; or FP8 with the run's precision.

    megagrpo verify my_run.yaml
    megagrpo verify my_run.yaml --layout tp=2,pp=2,dp=2 --layout cp=2
    megagrpo launch 8 verify my_run.yaml
    megagrpo verify my_run.yaml --precision --fix fp8.yaml

Without --layout it verifies the layout of the config. It starts the ranks of each layout on this machine; under a
launcher it uses the existing ranks. Exit code 0: all layouts agree, 1: one differs, 2: invalid config or option.
docs/verify.md explains the output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megagrpo.commands.arguments.config_arguments import add_config, load, overrides
from megagrpo.config import ConfigError
from megagrpo.config.io import config_file
from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import show

# options without and with --precision
LAYOUT_OPTIONS, PRECISION_OPTIONS = ("layout", "ranks", "full"), ("threshold", "tokens", "fix")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo verify`."""
    add_config(parser)
    add = parser.add_argument
    add("--layout", action="append", metavar="tp=2,pp=2,dp=2", help="a layout to verify; may be repeated")
    add("--ranks", type=int, metavar="N", help="number of ranks of a layout without dp")
    add("--full", action="store_true", default=None, help="print every tensor that is compared")
    add("--precision", action="store_true", help="compare FP8 with the run's own precision, layer by layer")
    add(
        "--threshold",
        type=float,
        metavar="ERROR",
        help="with --precision: allowed relative error of a layer (default 0.2)",
    )
    add("--tokens", type=int, metavar="N", help="with --precision: tokens of the batch (default 2048)")
    add(
        "--fix", type=Path, metavar="FILE", help="with --precision: write a config in which the bad layers stay in bf16"
    )
    add("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Verify, and return the exit code. Raises ConfigError for a wrong config or option."""
    chosen: dict[str, Any] = {
        name: value for name in (*LAYOUT_OPTIONS, *PRECISION_OPTIONS) if (value := getattr(options, name)) is not None
    }
    for invalid in chosen.keys() & set(LAYOUT_OPTIONS if options.precision else PRECISION_OPTIONS):
        raise ConfigError(
            f"--{invalid}: verify {'with' if options.precision else 'without'} --precision has no such option"
        )
    for name in ("ranks", "threshold", "tokens"):
        if not chosen.get(name, 1) > 0:
            raise ConfigError(f"--{name}: must be a positive number (got {chosen[name]})")
    load(options)
    path, words = config_file(options.config), overrides(options)
    if options.precision:
        with without_garbage_collection():
            from megagrpo.proof.verify.precision import verify_precision
        return verify_precision(path, words, json=options.json, **chosen)
    from megagrpo.commands.api.api_checks import verify_here

    rows = verify_here(path, words, **chosen, tell=None if options.json else show)
    passed = all(row["passed"] for row in rows)
    if options.json and rows:  # under a launcher rank 0 has them
        show(json.dumps(dict(config=str(path), passed=passed, layouts=rows), indent=1))
    return int(not passed)
