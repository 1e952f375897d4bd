"""Converts a Megatron distributed checkpoint to a Hugging Face folder that transformers and vLLM load.

    megagrpo export runs/grpo/checkpoints/step_000100 OUT --push OWNER/NAME
    megagrpo export runs/grpo/checkpoints/step_000100/adapter OUT --model MODEL
    megagrpo launch 2 export CHECKPOINT OUT --model MODEL --tp 2

CHECKPOINT is the output of `megagrpo convert` or of a training run, in any layout. MODEL names the Hugging Face model
from which the weights started: OUT gets its config, tokenizer, file names and dtypes. Both kinds contain this
information, so they need no MODEL. --dtype float32 keeps every bit of a run in float32; a line says when weights are
rounded. Memory does not grow with the model. After an interruption, repeat the command to continue.

If CHECKPOINT is an adapter of a LoRA run, OUT gets the adapter in PEFT's format, and MODEL is the base model that it
names. OUT gets a model card with the facts that the run's folder holds. --push uploads OUT to the Hugging Face hub.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands.arguments.export_arguments import add_export_arguments, export_and_push
from megagrpo.commands.arguments.layout_arguments import add_layout_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo export`."""
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="folder of a Megatron distributed checkpoint, or of an adapter",
    )
    add("out", type=Path, metavar="OUT", help="folder to create")
    add("--model", help="Hugging Face folder, hub name, or package:NAME")
    add_export_arguments(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Export, write the model card, upload with --push, and return the exit code."""
    return export_and_push(options, options.checkpoint, merged=False)
