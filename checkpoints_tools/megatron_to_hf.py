"""A Megatron distributed checkpoint -> a Hugging Face folder that transformers and vLLM load.

    python checkpoints_tools/megatron_to_hf.py CHECKPOINT OUT --model MODEL
    torchrun --nproc-per-node 2 checkpoints_tools/megatron_to_hf.py runs/grpo/checkpoints/step_000100 OUT --model MODEL --tp 2

CHECKPOINT is what hf_to_megatron.py or a training run has written, in whatever layout. MODEL names the Hugging Face model that the
weights started from: config and tokenizer are copied from it. A checkpoint of hf_to_megatron.py carries them and needs no MODEL.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from layout_arguments import add_layout_arguments, run_in_layout

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
