"""Converts a Megatron distributed checkpoint to a Hugging Face folder that transformers and vLLM load.

    megagrpo export CHECKPOINT OUT --model MODEL
    megagrpo launch 2 export runs/grpo/checkpoints/step_000100 OUT --model MODEL --tp 2

CHECKPOINT is the output of hf_to_megatron.py or of a training run, in any layout. MODEL names the Hugging Face model from which the
weights started: OUT gets its config, tokenizer, file names and dtypes. Checkpoints of hf_to_megatron.py and of training runs contain this
information, so they need no MODEL. Memory does not grow with the model. After an interruption, run the same command again to continue.
"""

from __future__ import annotations

import sys
from pathlib import Path

import argparse

from megagrpo.commands.layout_arguments import add_layout_arguments, run_in_layout
from megagrpo.bridge.convert import export_hf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a Megatron distributed checkpoint")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--model", help="Hugging Face folder, hub name, or package:NAME")
    add_layout_arguments(parser)
    args = parser.parse_args()
    return run_in_layout(args, lambda layout: export_hf(args.checkpoint, args.out, args.model, layout))


if __name__ == "__main__":
    sys.exit(main())
