"""Trains on this machine as CONFIG says.

    megagrpo train megagrpo:quickstart run.max_steps=20
    NPROC=4 megagrpo train my_run.yaml parallel.tp=2
    megagrpo train my_run.yaml --resume

It starts every rank of this machine: NPROC ranks, else one per GPU, else as few as the layout in `parallel` needs.
Under a launcher of ranks, such as torchrun, it is one rank; `megagrpo submit` starts a run on several nodes. In a
clone, launch/local.sh is the same command with the clone's .venv.

Exit codes: 0 at the end of the run, 1 for an error, 2 for a wrong config or command line, 85 when the run has saved and
its scheduler restarts it, 128 + the signal's number when a signal stopped it for good. With several ranks it is the
code of the rank that failed first.
"""

from __future__ import annotations

import argparse
import os

from megagrpo.commands.config_arguments import add_config, add_resume, config_path, load, overrides
from megagrpo.config import ConfigError, RunConfig
from megagrpo.platform.process.environment import launched
from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.trainer.time_limit import end_of_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo train`."""
    add_config(parser)
    add_resume(parser)


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code. Raises ConfigError for a config that cannot run here."""
    config, path = load(options), config_path(options)
    end_of_run(config.run.time_limit)
    is_rank = launched(os.environ)
    if not is_rank and (ranks := _ranks_to_start(config)) > 1:
        from megagrpo.platform.launch.job_nodes import ONE_NODE
        from megagrpo.platform.launch.local import run_ranks

        return run_ranks(ranks, ONE_NODE, ["megagrpo", "train", options.config, *overrides(options)])
    with without_garbage_collection():
        from megagrpo.trainer import rank
    with rank.exit_code() as ended, rank.make_trainer(config, path.parent, ended) as trainer:
        ended.stopped_by = trainer.run()
    return ended.code


def _ranks_to_start(config: RunConfig) -> int:
    """Return the number of ranks to start on this machine, and set the environment of their threads. Raises ConfigError
    with the problems of the plan before any rank starts."""
    from megagrpo.platform.launch.local import num_ranks, set_connections, set_thread_environment
    from megagrpo.proof.plan import plan

    nodes = config.run.nodes
    if nodes > 1:
        raise ConfigError(
            f"run.nodes: {nodes} nodes, but this command starts the ranks of one; use megagrpo submit, or set "
            f"run.nodes=1"
        )
    ranks = num_ranks(config.rollout, config.parallel)
    if ranks > 1 and (problems := plan(config, ranks).problems):
        raise ConfigError("\n".join(map(str, problems)))
    set_thread_environment(ranks)
    set_connections(config.parallel)
    return ranks
