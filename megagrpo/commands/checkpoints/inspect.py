"""Lists the tensors and metadata of a checkpoint, an adapter or a model.

    megagrpo inspect CHECKPOINT
    megagrpo inspect MODEL --json

CHECKPOINT is a Megatron distributed checkpoint or an adapter, MODEL a Hugging Face folder or package:NAME. Only headers
of files are read. Exit code 2: it cannot be read, or a run would refuse the model, for the reason in the line
"refused".
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
    add = parser.add_argument
    add("path", metavar="PATH", help="folder of a model or a checkpoint, or package:NAME")
    add("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the content, and return the exit code."""
    hide_gpus()
    with without_garbage_collection():
        from megagrpo.families.weight_sources import PACKAGE, resolve_model
        from megagrpo.records.checkpoints.checkpoint_contents import as_text, contents, totals
    try:
        path = resolve_model(options.path) if options.path.startswith(PACKAGE) else Path(options.path).expanduser()
        found = contents(path)
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    rows = asdict(found) | dict(totals=totals(found.tensors))
    show(json.dumps(rows, indent=1) if options.json else as_text(path, found))
    return 2 if found.refused else 0
