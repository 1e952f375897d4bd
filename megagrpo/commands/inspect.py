"""Lists the content of a checkpoint: names, shapes, dtypes and sizes of its tensors, totals, and its metadata.

    megagrpo inspect PATH
    megagrpo inspect PATH --json

PATH is a Hugging Face folder, a Megatron distributed checkpoint (of `megagrpo convert`, a training run, or another
program), or an adapter folder. No weights are read.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megagrpo.commands.api.conversions import hide_gpus
from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import show, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo inspect`."""
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a checkpoint")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the content, and return the exit code."""
    hide_gpus()
    with without_garbage_collection():
        from megagrpo.records.contents import as_text, contents, totals
    try:
        checkpoint = contents(options.path)
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    if options.json:
        show(json.dumps(asdict(checkpoint) | dict(totals=totals(checkpoint.tensors)), indent=1))
    else:
        show(as_text(options.path, checkpoint))
    return 0
