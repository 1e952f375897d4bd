"""Starts the ranks of a command on this machine under torchrun's agent, and counts the ranks of a run."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

from megagrpo.cluster.launch.preflight import needs_one_connection, visible_gpu_lines
from megagrpo.config import ConfigError, ParallelSection, RolloutSection, RunConfig
from megagrpo.platform.process.cleanup.scratch import temporary_files
from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT, LAUNCHER_VARIABLE, OPENMP
from megagrpo.trainer.saving.time_limit import TO_BE_CONTINUED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import LogsSpecs

    from megagrpo.cluster.launch.launcher_rendezvous import Nodes

SHUTDOWN_SECONDS = 180  # after a signal, for the ranks to finish their step and write a checkpoint


def num_gpus() -> int:
    """Return the number of GPUs that are visible to a child process."""
    return len(visible_gpu_lines(ENVIRONMENT))


def num_ranks(rollout: RolloutSection, parallel: ParallelSection) -> int:
    """Return the number of ranks to start on this machine: `NPROC` if set, else one per GPU that no dedicated server
    uses; without GPUs the smallest number for the layout. Raises ConfigError."""
    if nproc := ENVIRONMENT.get("NPROC", ""):
        if not nproc.isdigit() or int(nproc) == 0:
            raise ConfigError(
                f"NPROC={nproc}: must be a positive number of ranks; unset it for the smallest number that fits the "
                "config"
            )
        return int(nproc)
    has_local_servers = rollout.placed == "dedicated" and rollout.nodes_per_server == 1
    server_gpus, gpus = rollout.servers * rollout.devices_per_server if has_local_servers else 0, num_gpus()
    if gpus and gpus <= server_gpus:
        raise ConfigError(
            f"rollout.placement: dedicated servers need {server_gpus} GPUs, rollout.servers {rollout.servers} x "
            f"{rollout.server_text}, but this machine has {gpus}; leave some to the trainer, or choose colocated"
        )
    return gpus - server_gpus if gpus else parallel.smallest_world


def set_thread_environment(ranks: int) -> None:
    """Set OpenMP's environment: how threads wait (`OPENMP`), and an equal share of the cores for each rank."""
    for variable, value in OPENMP.items():
        ENVIRONMENT.setdefault(variable, value)
    ENVIRONMENT.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    ENVIRONMENT.setdefault("TOKENIZERS_PARALLELISM", "false")
    ENVIRONMENT.setdefault("PYTHONUNBUFFERED", "1")


def set_cuda_max_connections(config: RunConfig) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS=1, unless it is set, on GPUs before Blackwell if `config.one_connection`. vLLM
    servers do not inherit it."""
    if config.one_connection and needs_one_connection(visible_gpu_lines(ENVIRONMENT)):
        ENVIRONMENT.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@temporary_files()  # torchrun leaves an empty folder for logs
def run_ranks(ranks: int, command: list[str], nodes: Nodes | None = None, logs: LogsSpecs | None = None) -> int:
    """Run this machine's ranks of a command under torchrun's agent. Return the exit code of the first rank that failed,
    128 + the number of a signal, or 85 for SIGTERM in a job.

    `command` is a Python file or a module, with its arguments. The agent runs in this process, gets its signals and
    forwards them to the ranks. It changes this process's environment and `socket.getfqdn`. `nodes` None is this node
    alone. `logs` sets log files.
    """
    ENVIRONMENT.setdefault("LOGLEVEL", "ERROR")
    for name in [name for name in ENVIRONMENT if name.startswith("PET_")]:
        del ENVIRONMENT[name]  # defaults of torchrun's options
    # the agent calls getfqdn often, and each call takes 10 s if the DNS server does not respond
    vars(socket).update(getfqdn=lambda name="": name or socket.gethostname())
    ENVIRONMENT[LAUNCHER_VARIABLE] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import config_from_args, elastic_launch, parse_args

    from megagrpo.cluster.launch import launcher_rendezvous

    rendezvous = launcher_rendezvous.options(nodes or launcher_rendezvous.Nodes())
    options = [f"--nproc-per-node={ranks}", f"--shutdown-timeout={SHUTDOWN_SECONDS}"]
    options += [] if command[0].endswith(".py") else ["-m"]
    config, program, arguments = config_from_args(parse_args([*rendezvous, *options, *command]))
    if logs is not None:
        # no prefix: one rank is printed
        config.logs_specs, config.role, config.log_line_prefix_template = logs, "", "${role_name}"
    try:
        elastic_launch(config, program)(*arguments)
    except SignalException as stopped:
        in_a_job = stopped.sigval == signal.SIGTERM and "MEGAGRPO_JOB" in ENVIRONMENT
        return TO_BE_CONTINUED if in_a_job else 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            warn(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}; the other ranks were stopped")
        elif failure.exitcode != TO_BE_CONTINUED:
            warn(f"rank {rank} failed first, with exit code {failure.exitcode}; see its message above")
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0
