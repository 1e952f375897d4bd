"""Starts one trainer process per rank on this machine, with torchrun for several ranks; `local.sh` calls it.

Number of ranks: `NPROC` from the environment, else the number of GPUs, else the smallest number that fits the config's section
`parallel`. Exit code: the trainer's exit code, 2 for an invalid config, 128 + the signal's number when Ctrl-C or SIGTERM ended the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from megagrpo.__main__ import parse
from megagrpo.config import ConfigError, RunConfig
from megagrpo.plan import plan
from megagrpo.process.parent_death import LAUNCHER_VARIABLE
from megagrpo.process.scratch import temporary_files
from megagrpo.process.terminal import warn

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import LogsSpecs

SHUTDOWN_SECONDS = 180  # after a signal, for the ranks to finish their step and write a checkpoint
TO_BE_CONTINUED = 85  # exit code of a trainer that has saved and that the scheduler should restart
LOOPBACK = "127.0.0.1"


class Nodes(NamedTuple):
    """The nodes of a job, as the node with index `rank` knows them. `address` and `port` are the first node's; one node needs neither."""

    rank: int = 0
    num_nodes: int = 1
    address: str = LOOPBACK
    port: int = 0


ONE_NODE = Nodes()


def num_gpus() -> int:
    """Return the number of GPUs that are visible to a child process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return listing.count("GPU ")


def num_ranks(config: RunConfig) -> int:
    """Return the number of ranks to start: `NPROC` if set. Dedicated servers use the GPUs after the ranks' GPUs. Raises ConfigError."""
    wanted = os.environ.get("NPROC", "")
    if not wanted:
        set_aside = config.rollout.servers * config.rollout.tp if config.rollout.placed == "dedicated" else 0
        gpus = num_gpus()
        if gpus and gpus <= set_aside:
            raise ConfigError(
                f"rollout.placement: dedicated servers need {set_aside} GPUs, rollout.servers {config.rollout.servers} x rollout.tp "
                f"{config.rollout.tp}, but this machine has {gpus}; leave some to the trainer, or choose colocated"
            )
        return gpus - set_aside if gpus else config.parallel.smallest_world
    if not wanted.isdigit() or int(wanted) == 0:
        raise ConfigError(f"NPROC={wanted}: must be a positive number of ranks; unset it for the smallest number that fits the config")
    return int(wanted)


def set_thread_environment(ranks: int) -> None:
    """Set OpenMP's environment: waiting threads sleep, because spinning makes a busy machine 8 to 60 times slower. Each rank gets an equal
    share of the cores."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")


def torchrun(ranks: int, trainer: list[str]) -> int:
    """Run the ranks of a run on one machine. Returns the exit code."""
    return run_ranks(ranks, ONE_NODE, trainer)


@temporary_files()  # torchrun leaves an empty folder for logs
def run_ranks(ranks: int, nodes: Nodes, trainer: list[str], logs: LogsSpecs | None = None) -> int:
    """Run this machine's ranks under torchrun's agent and return the exit code. The agent runs in this process, so it gets signals and
    forwards them to the ranks. `logs` sets the ranks' log files."""
    os.environ.setdefault("LOGLEVEL", "ERROR")
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import config_from_args, elastic_launch, parse_args

    from megagrpo.launch import rendezvous

    options = [*rendezvous.options(nodes), f"--nproc-per-node={ranks}", f"--shutdown-timeout={SHUTDOWN_SECONDS}"]
    config, program, words = config_from_args(parse_args([*options, *([] if trainer[0].endswith(".py") else ["-m"]), *trainer]))
    if logs is not None:
        config.logs_specs, config.role, config.log_line_prefix_template = logs, "", "${role_name}"  # no prefix: one rank is printed
    try:
        elastic_launch(config, program)(*words)
    except SignalException as stopped:
        return TO_BE_CONTINUED if stopped.sigval == signal.SIGTERM and "MEGAGRPO_JOB" in os.environ else 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            print(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}; the other ranks were stopped", file=sys.stderr)
        elif failure.exitcode != TO_BE_CONTINUED:
            print(f"rank {rank} failed first, with exit code {failure.exitcode}; see its message above", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def main(arguments: list[str]) -> int:
    try:
        command = parse(["train", *arguments])
        if command.config.run.nodes > 1:
            raise ConfigError(
                f"run.nodes: {command.config.run.nodes} nodes, but this script starts one; use megagrpo submit, or set run.nodes=1"
            )
        ranks = num_ranks(command.config)
        if problems := plan(command.config, ranks).problems:
            raise ConfigError("\n".join(map(str, problems)))
    except ConfigError as error:
        warn(error)
        return 2
    set_thread_environment(ranks)
    trainer = ["megagrpo", "train", *arguments]
    if ranks > 1:
        return torchrun(ranks, trainer)
    os.execv(sys.executable, [sys.executable, "-m", *trainer])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
