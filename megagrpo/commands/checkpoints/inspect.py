"""Shows what a run would load of a model, and what it would refuse; or the content of a checkpoint.

    megagrpo inspect MODEL
    megagrpo inspect MODEL --tensors
    megagrpo inspect CHECKPOINT --json

MODEL is a Hugging Face folder, a hub name or package:NAME. Shown are family, sizes, precision, kept and tied tensors
and LoRA's targets. --tensors lists the tensors of its files. CHECKPOINT is a Megatron distributed checkpoint or an
adapter: its tensors and metadata are listed.

Only headers of files are read, and of the hub only config.json. Exit code 2: a run would refuse the model, for the
reasons in the lines with "refused".
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
    add("path", metavar="PATH", help="folder of a model or a checkpoint, hub name, or package:NAME")
    add("--tensors", action="store_true", help="also list the tensors of a model")
    add("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report or the content, and return the exit code."""
    hide_gpus()
    with without_garbage_collection():
        from megagrpo.commands.api import model_report
        from megagrpo.records.checkpoints.checkpoint_contents import as_text, contents, is_model, of_checkpoint, totals
    path = Path(options.path).expanduser()
    try:
        if path.is_dir() and not is_model(path):
            checkpoint = contents(path)
            rows = asdict(checkpoint) | dict(totals=totals(checkpoint.tensors))
            show(json.dumps(rows, indent=1) if options.json else as_text(path, checkpoint))
            return 0
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    report = model_report.model_report(options.path)
    opened = of_checkpoint(report.checkpoint) if report.checkpoint else None
    if options.json:
        rows = asdict(opened) | dict(totals=totals(opened.tensors)) if opened else {}
        found = dict(path=report.path, model=report.facts, notes=report.notes, problems=report.problems)
        show(json.dumps(rows | found, indent=1))
    else:
        listed = [as_text(path, opened)] if opened and options.tensors else []
        show("\n".join([*listed, model_report.as_text(report)]))
    return 2 if report.problems else 0
