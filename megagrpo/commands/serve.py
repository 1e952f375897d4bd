"""Starts CONFIG's vLLM servers on this machine for a trainer on other machines, and runs them until SIGTERM or Ctrl-C.

    MEGAGRPO_TOKEN_FILE=token megagrpo serve my_run.yaml rollout.servers=2 \\
        --urls addresses --reach trainer-node

    # a server on several nodes: on each of them, with its index
    megagrpo serve my_run.yaml --head 10.0.0.1:29600 --node 0

Jobs of `megagrpo submit` run this command (docs/slurm.md). The servers accept only requests with the token of
`rollout.token_file` or the environment. Exit code 0: ended by a signal, 1: every server exceeded rollout.max_restarts
or lost a node, 2: a server did not start.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.commands.arguments.config_arguments import add_config, load
from megagrpo.platform.process.imports import without_garbage_collection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo serve`."""
    add = parser.add_argument
    add_config(parser)
    add(
        "--urls",
        type=Path,
        metavar="FOLDER",
        help="write the addresses to FOLDER/NODE.url when all servers are healthy",
    )
    add("--reach", metavar="HOST", help="listen on this machine's address on the route to HOST")
    add("--logs", type=Path, metavar="FOLDER", default=Path(), help="folder of the logs (default: the current folder)")
    add("--first-gpu", type=int, default=0, metavar="N", help="first GPU of the servers (default 0)")
    add(
        "--head",
        metavar="HOST:PORT,...",
        help="with rollout.nodes_per_server: the first node of each server, and a free port there",
    )
    add("--node", type=int, metavar="N", help="index of this node among the nodes of all servers (default: Slurm's)")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal, and return the exit code. Raises ConfigError when a server does not start."""
    from megagrpo.engine.servers.serve_inputs import check_inputs, reported_errors

    config = load(options)
    with reported_errors(options.urls):
        token, place = check_inputs(config.rollout, config.model.path, options.head, options.node)
        with without_garbage_collection():
            from megagrpo.engine.servers.remote import serve
        return serve(config, options.urls, options.logs, options.reach, options.first_gpu, token, place)
