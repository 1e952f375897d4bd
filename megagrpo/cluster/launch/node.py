"""Starts the trainer's ranks on one node, like torchrun with a static rendezvous. Run it once on every node:

    python -m megagrpo.cluster.launch.node --nodes 2 --ranks 8 --master 10.0.0.1:29400 [--logs FOLDER] CONFIG
    [key=value ...]

The node's index comes from its Slurm task, or from its pod in an indexed Kubernetes job. Each rank logs to
`FOLDER/rank_00003.log`; the log of rank 0 is also printed. Exit code: 85 when the trainer has saved and should be
restarted, else the exit code of the rank that failed first.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from megagrpo.cluster.launch.launcher_rendezvous import Nodes
from megagrpo.cluster.launch.local import run_ranks, set_cuda_max_connections, set_thread_environment
from megagrpo.config import ConfigError, load_config
from megagrpo.engine.http.connections import healthy
from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT, NODE_INDICES
from megagrpo.records.checkpoints.run_files import make_run_folder


class RankLogs(LogsSpecs):
    """Writes one log file per rank, named by its global rank; the log of rank 0 is also printed."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder of the log files."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folder, set each rank's error file in `envs`, and return the log files: local rank -> file."""
        make_run_folder(self.folder)
        files = {local: str(self.folder / f"rank_{int(env['RANK']):05d}.log") for local, env in envs.items()}
        printed = {local: files[local] for local, env in envs.items() if int(env["RANK"]) == 0}
        errors = {local: str(self.folder / f".error_{env['RANK']}.json") for local, env in envs.items()}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        return LogsDest(files, files, printed, {}, errors, os.devnull, os.devnull)


def wait_until_healthy(urls: list[str], timeout: float) -> list[str]:
    """Wait until all servers have passed a health check, at most `timeout` seconds. Return those that have not."""
    deadline = time.monotonic() + timeout
    while urls and time.monotonic() < deadline:
        urls = [url for url in urls if not healthy(url)]
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())) if urls else 0)
    return urls


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="on each node")
    parser.add_argument("--master", required=True, help="address:port of the first node")
    parser.add_argument("--logs", type=Path)
    parser.add_argument(
        "--wait-for", default="", help="addresses of servers, separated by commas, that must be healthy first"
    )
    parser.add_argument("--wait-seconds", type=float, default=600.0)
    options, train_arguments = parser.parse_known_args(arguments)
    if unhealthy := wait_until_healthy([url for url in options.wait_for.split(",") if url], options.wait_seconds):
        warn(f"no response from {', '.join(unhealthy)} within {options.wait_seconds:g} s (rollout.startup_timeout)")
        return 1
    address, _, port = options.master.rpartition(":")
    index = next((ENVIRONMENT[name] for name in NODE_INDICES if name in ENVIRONMENT), "0")
    set_thread_environment(options.ranks)
    try:
        set_cuda_max_connections(load_config(train_arguments[0], train_arguments[1:]))
    except ConfigError as error:
        warn(str(error))
        return 2
    nodes, logs = Nodes(int(index), options.nodes, address, int(port)), RankLogs(options.logs) if options.logs else None
    return run_ranks(options.ranks, ["megagrpo", "train", *train_arguments], nodes, logs)


if __name__ == "__main__":
    raise SystemExit(main())
