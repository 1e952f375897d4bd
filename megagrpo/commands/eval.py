"""Evaluates the held-out sets of CONFIG with vLLM, without training.

    megagrpo eval my_run.yaml
    megagrpo eval my_run.yaml --checkpoint best --output scores.json

Exit code 0: all sets were evaluated, 1: a server failed, 2: the config or an option is wrong, 128 + N: signal N.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands.arguments.config_arguments import add_config, load
from megagrpo.config.io import config_file
from megagrpo.platform.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo eval`."""
    add = parser.add_argument
    add_config(parser)
    add("--checkpoint", metavar="latest|best|PATH", help="a checkpoint of the run (default: model.path as it is)")
    add("--adapter", metavar="FOLDER", help="a LoRA adapter on top of the model")
    add("--output", type=Path, metavar="FILE", help="write metrics and responses as JSON")


def run(options: argparse.Namespace) -> int:
    """Print a table of the sets and return the exit code. Raises ConfigError for mistakes in the config or options."""
    from megagrpo.commands.api.evaluate_call import evaluate_here

    config, checkpoint, adapter = load(options), options.checkpoint, options.adapter
    result = evaluate_here(config, config_file(options.config).parent, checkpoint, adapter)
    from megagrpo.trainer.evaluation import offline

    show(offline.table(result.metrics, list(result.by_set)))
    if options.output is not None:
        answer = {"checkpoint": checkpoint, "adapter": adapter, "metrics": result.metrics, "responses": result.by_set}
        offline.write(options.output, answer)
    return 0
