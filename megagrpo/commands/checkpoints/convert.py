"""Converts Hugging Face weights to a Megatron distributed checkpoint (weights only).

    megagrpo convert MODEL OUT
    megagrpo launch 4 convert MODEL OUT --tp 2 --pp 2
    megagrpo convert MODEL OUT --megatron-lm

The checkpoint loads in any layout; more ranks only share the work. Memory does not grow with the model. After an
interruption, run the same command again to continue.

With --megatron-lm, OUT is a folder that Megatron-LM loads into its GPTModel with --load OUT.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.commands.arguments.layout_arguments import add_layout_arguments, run_in_layout

if TYPE_CHECKING:
    from megagrpo.platform.parallel.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo convert`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face folder, hub name, or package:NAME")
    add("out", type=Path, metavar="OUT", help="folder to create")
    add("--megatron-lm", action="store_true", help="write the checkpoint for the GPTModel of Megatron-LM")
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Convert, and return the exit code."""

    def action(layout: Layout) -> None:
        from megagrpo.records.progress_bars import conversion_progress
        from megagrpo.weights.bridge.conversion import import_hf

        progress = conversion_progress(layout.world_rank)
        import_hf(options.model, options.out, layout, progress, options.megatron_lm)

    return run_in_layout(options, action)
