"""Checks that converting a model to Megatron's format and back changes no byte, and writes a manifest of the model.

    megagrpo roundtrip MODEL
    megagrpo launch 4 roundtrip MODEL --tp 2 --ep 2 --manifest model.json \\
        --scratch /data

Converts MODEL in both directions in --scratch, which temporarily needs twice the model's size. Compares names, dtypes,
shapes and bytes of all tensors, the files byte by byte, and the index. The manifest holds the sha256 of every tensor
and file. Exit code 0: everything is equal, except tensors that the architecture does not use, which are counted. Exit
code 1: there are differences, and the first ones are printed. Exit code 2: the model cannot be converted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.commands.arguments.layout_arguments import add_layout_arguments, run_in_layout
from megagrpo.config import ConfigError

if TYPE_CHECKING:
    from megagrpo.platform.parallel.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo roundtrip`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face folder, hub name, or package:NAME")
    add("--manifest", type=Path, metavar="FILE", help="file to write (default: NAME.manifest.json here)")
    add(
        "--scratch",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="folder with room for the model twice (default: .)",
    )
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Check one model, and return the exit code. Raises ConfigError for a wrong folder."""
    if not options.scratch.is_dir():
        raise ConfigError(
            f"--scratch: {options.scratch} is not a folder; create it, or name one with room for the model twice"
        )
    unchanged: list[bool] = []

    def action(layout: Layout) -> None:
        from megagrpo.weights.bridge.conversion import check

        unchanged.append(check(options.model, options.manifest, options.scratch, layout))

    return run_in_layout(options, action) or int(not unchanged[0])
