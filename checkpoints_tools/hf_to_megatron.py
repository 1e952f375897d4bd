"""Hugging Face weights -> a Megatron distributed checkpoint (weights only).

    python checkpoints_tools/hf_to_megatron.py MODEL OUT
    torchrun --nproc-per-node 4 checkpoints_tools/hf_to_megatron.py MODEL OUT --tp 2 --pp 2

The checkpoint reads back in any layout; more ranks only spread memory and work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from layout_arguments import add_layout_arguments, run_in_layout

from megagrpo.bridge.load import load_hf
from megagrpo.bridge.megatron_io import save_model
from megagrpo.bridge.sources import resolve_model
from megagrpo.parallel.layout import Layout
from megagrpo.policy.build import build_model, weights_dtype
from megagrpo.policy.hf_config import load_hf_config


def convert(model: str, out: Path, layout: Layout) -> None:
    """Write `out`: Megatron's files, and config and tokenizer under out/hf. Collective."""
    source = resolve_model(model)
    hf_config = load_hf_config(source)
    chunks = build_model(hf_config, layout, dtype=weights_dtype(hf_config), init_weights=False)
    load_hf(chunks, hf_config, source, layout)
    save_model(chunks, out, layout, source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder, hub name, or package:NAME")
    parser.add_argument("out", type=Path, help="folder to create")
    add_layout_arguments(parser)
    args = parser.parse_args()
    return run_in_layout(args, lambda layout: convert(args.model, args.out, layout))


if __name__ == "__main__":
    sys.exit(main())
