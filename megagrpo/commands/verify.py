"""Compares a run's parallel layouts with one process, on a shrunken copy of its model.

    megagrpo verify my_run.yaml
    megagrpo verify my_run.yaml --layout tp=2,pp=2,dp=2 --layout cp=2
    megagrpo launch 8 verify my_run.yaml

Without --layout it verifies the layout of the config. It starts the ranks of each layout on this machine; under a
launcher it uses the existing ranks. Exit code 0: all layouts agree, 1: one differs, 2: invalid config or option.
docs/verify.md explains the output.
"""

from __future__ import annotations

import argparse
import json

from megagrpo.commands.arguments.config_arguments import add_config, load, overrides
from megagrpo.config import ConfigError
from megagrpo.config.io import config_file
from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo verify`."""
    add_config(parser)
    add = parser.add_argument
    add("--layout", action="append", metavar="tp=2,pp=2,dp=2", help="a layout to verify; may be repeated")
    add("--ranks", type=int, metavar="N", help="number of ranks of a layout without dp")
    add("--full", action="store_true", help="print every tensor that is compared")
    add("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Verify, and return the exit code. Raises ConfigError for a wrong config or option."""
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks: must be a positive number (got {options.ranks})")
    load(options)
    with without_garbage_collection():
        from megagrpo.proof.verify.layouts import verify_layouts

    path, tell = config_file(options.config), None if options.json else show
    rows = verify_layouts(path, overrides(options), options.layout or (), options.ranks, options.full, tell=tell)
    passed = all(row["passed"] for row in rows)
    if options.json and rows:  # under a launcher rank 0 has them
        show(json.dumps(dict(config=str(path), passed=passed, layouts=rows), indent=1))
    return int(not passed)
