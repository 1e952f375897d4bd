"""Converts a Megatron distributed checkpoint to a Hugging Face folder that transformers and vLLM load.

    megagrpo export runs/grpo/checkpoints/step_000100 OUT
    megagrpo launch 2 export CHECKPOINT OUT --model MODEL --tp 2

CHECKPOINT is the output of `megagrpo convert` or of a training run, in any layout. MODEL names the Hugging Face model from which the
weights started: OUT gets its config, tokenizer, file names and dtypes. Checkpoints of `megagrpo convert` and of training runs contain
this information, so they need no MODEL. Memory does not grow with the model. After an interruption, run the same command again to
continue.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.commands.layout_arguments import add_layout_arguments, run_in_layout

if TYPE_CHECKING:
    from megagrpo.parallel.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo export`."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a Megatron distributed checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create")
    parser.add_argument("--model", help="Hugging Face folder, hub name, or package:NAME")
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Convert, and return the exit code."""

    def action(layout: Layout) -> None:
        from megagrpo.bridge.convert import export_hf
        from megagrpo.records.progress import conversion_progress

        export_hf(options.checkpoint, options.out, options.model, layout, conversion_progress(layout.world_rank))

    return run_in_layout(options, action)
