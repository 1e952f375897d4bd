"""Merges a LoRA adapter into a model's weights and writes a Hugging Face folder.

    megagrpo merge runs/grpo/checkpoints/step_000100/adapter OUT
    megagrpo launch 2 merge ADAPTER OUT --model MODEL --tp 2

ADAPTER is an adapter folder of a run or of PEFT. Without --model it uses the base model that the adapter names.
W + scale B A is computed in float32 and rounded once, to the dtype in the model's file or to --dtype. OUT gets a model
card with the run's training and rewards, if ADAPTER is in a run's folder. --push uploads OUT to the Hugging Face hub.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands.arguments.export_arguments import add_export_arguments, export_and_push
from megagrpo.commands.arguments.layout_arguments import add_layout_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo merge`."""
    add = parser.add_argument
    add("adapter", type=Path, metavar="ADAPTER", help="folder with adapter_config.json and adapter_model.safetensors")
    add("out", type=Path, metavar="OUT", help="folder to create")
    add("--model", help="Hugging Face folder, hub name, or package:NAME (default: the adapter's base model)")
    add_export_arguments(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Merge, write the model card, upload with --push, and return the exit code."""
    return export_and_push(options, options.adapter, merged=True)
