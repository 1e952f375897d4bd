"""Trains on this machine as CONFIG says.

    megagrpo train megagrpo:quickstart run.max_steps=20
    NPROC=4 megagrpo train my_run.yaml parallel.tp=2
    megagrpo train my_run.yaml --resume
    megagrpo train my_run.yaml --from runs/my_run run.name=again

It starts every rank of this machine: NPROC ranks, else one per GPU, else as few as the layout in `parallel` needs.
Under a launcher of ranks, such as torchrun, it is one rank; `megagrpo submit` starts a run on several nodes. In a
clone, launch/local.sh is the same command with the clone's .venv.

Exit codes: 0 at the end of the run, 1 for an error, 2 for a wrong config or command line, 85 when the run has saved and
its scheduler restarts it, 128 + the signal's number when a signal stopped it for good. With several ranks it is the
code of the rank that failed first.
"""

from __future__ import annotations

import argparse

from megagrpo.commands.arguments.config_arguments import add_config, add_resume, overrides
from megagrpo.config import absolute_override


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo train`."""
    add_config(parser)
    add_resume(parser)
    parser.add_argument(
        "--from",
        dest="kept",
        metavar="RUN",
        help="train on the rollouts that this run has kept, without servers (rollout.kept.path)",
    )


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code. Raises ConfigError for a config that cannot run here."""
    from megagrpo.commands.api.train_call import run_training

    words = overrides(options)
    if options.kept is not None:
        words.append(absolute_override(f"rollout.kept.path={options.kept}"))
    return run_training(options.config, words)
