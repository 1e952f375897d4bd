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

from megagrpo.bridge.adapters import ADAPTER_FILES
from megagrpo.bridge.export import save_hf
from megagrpo.bridge.megatron_io import HF_FILES, load_model
from megagrpo.bridge.sources import resolve_model
from megagrpo.parallel.layout import Layout
from megagrpo.policy.build import build_model, weights_dtype
from megagrpo.policy.hf_config import load_hf_config


def convert(checkpoint: Path, out: Path, model: str | None, layout: Layout) -> None:
    """Write `out`: safetensors in the dtype of the model's config.json, config and tokenizer. Collective."""
    if (checkpoint / ADAPTER_FILES).is_dir():
        raise ValueError(f"{checkpoint} holds an adapter and no weights; merge it: merge_adapter.py {checkpoint / ADAPTER_FILES} {out}")
    if model is None and not (checkpoint / HF_FILES).is_dir():
        raise ValueError(f"{checkpoint} carries no {HF_FILES} folder with config.json; name the model it started from with --model")
    source = resolve_model(model) if model else checkpoint / HF_FILES
    hf_config = load_hf_config(source)
    chunks = build_model(hf_config, layout, dtype=weights_dtype(hf_config), init_weights=False)
    load_model(chunks, checkpoint, layout)
    save_hf(chunks, hf_config, layout, out, source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a Megatron distributed checkpoint")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--model", help="Hugging Face folder, hub name, or package:NAME")
    add_layout_arguments(parser)
    args = parser.parse_args()
    return run_in_layout(args, lambda layout: convert(args.checkpoint, args.out, args.model, layout))


if __name__ == "__main__":
    sys.exit(main())
