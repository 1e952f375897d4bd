"""Starts several ranks of a command on this machine, like `torchrun --standalone`, without a port open to other hosts.

    megagrpo launch 4 convert MODEL OUT --tp 2
    megagrpo launch 8 verify my_run.yaml
    megagrpo launch 2 my_script.py --any option

COMMAND is a command of megagrpo that computes with several ranks, or a Python file. `megagrpo launch 4 train CONFIG` is
the same as `NPROC=4 megagrpo train CONFIG`. Exit code: the exit code of the rank that failed first.
"""

from __future__ import annotations

import argparse

from megagrpo.commands.arguments.config_arguments import overrides
from megagrpo.commands.parser import parse
from megagrpo.config import ConfigError

WITH_RANKS = ("train", "verify", "convert", "export", "merge", "roundtrip")  # other commands run in one process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo launch`."""
    add = parser.add_argument
    add("ranks", type=int, metavar="N", help="number of ranks")
    add("command", metavar="COMMAND", help=f"{', '.join(WITH_RANKS)}, or a Python file")
    add("words", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")


def run(options: argparse.Namespace) -> int:
    """Run the ranks, and return the exit code. Raises ConfigError for a wrong command line, before any rank starts."""
    if options.ranks < 1:
        raise ConfigError(f"megagrpo launch: N must be a positive number of ranks (got {options.ranks})")
    command = [options.command, *options.words]
    if not options.command.endswith(".py"):
        chosen = parse(command)
        if options.command not in WITH_RANKS:
            raise ConfigError(
                f"megagrpo launch: {options.command} runs in one process; leave out `launch {options.ranks}`"
            )
        if options.command == "train":
            from megagrpo.commands.api.train_call import run_training

            return run_training(chosen.config, overrides(chosen), options.ranks)
        command = ["megagrpo", *command]
    from megagrpo.cluster.launch.local import run_ranks, set_thread_environment

    set_thread_environment(options.ranks)
    return run_ranks(options.ranks, command)
