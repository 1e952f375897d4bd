"""Converts Hugging Face weights to a Megatron distributed checkpoint (weights only).

    megagrpo convert MODEL OUT
    megagrpo launch 4 convert MODEL OUT --tp 2 --pp 2

The checkpoint loads in any layout; more ranks only share the work. Memory does not grow with the model. After an interruption, run the
same command again to continue.
"""

from __future__ import annotations

import sys
from pathlib import Path

import argparse

from megagrpo.commands.layout_arguments import add_layout_arguments, run_in_layout
from megagrpo.bridge.convert import import_hf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder, hub name, or package:NAME")
    parser.add_argument("out", type=Path, help="folder to create")
    add_layout_arguments(parser)
    args = parser.parse_args()
    return run_in_layout(args, lambda layout: import_hf(args.model, args.out, layout))


if __name__ == "__main__":
    sys.exit(main())
