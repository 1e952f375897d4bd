"""Evaluates the held-out sets of CONFIG with vLLM, without training.

    megagrpo eval my_run.yaml
    megagrpo eval my_run.yaml --checkpoint best --output scores.json

Exit code 0: all sets were evaluated, 1: a server failed, 2: the config or an option is wrong, 128 + the signal's number
after a signal.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from megagrpo.commands.config_arguments import add_config, config_path, load
from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo eval`."""
    add_config(parser)
    parser.add_argument(
        "--checkpoint", metavar="latest|best|PATH", help="a checkpoint of the run (default: model.path as it is)"
    )
    parser.add_argument("--adapter", metavar="FOLDER", help="a LoRA adapter on top of the model")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write metrics and responses as JSON")


def run(options: argparse.Namespace) -> int:
    """Print a table of the sets, and return the exit code. Raises ConfigError for mistakes in the config or the
    options."""
    config, checkpoint, adapter = load(options), options.checkpoint, options.adapter
    with without_garbage_collection():
        from megagrpo.engine.servers.serving import exit_code
        from megagrpo.trainer.evaluation import offline

    def command() -> None:
        with ExitStack() as resources:
            metrics, responses = offline.evaluate_offline(
                config, config_path(options).parent, checkpoint, adapter, resources
            )
        show(offline.table(metrics, list(responses)))
        if options.output is not None:
            offline.write(
                options.output,
                {"checkpoint": checkpoint, "adapter": adapter, "metrics": metrics, "responses": responses},
            )

    return exit_code(command, "evaluation")
