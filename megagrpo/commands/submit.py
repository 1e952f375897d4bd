"""Writes the job of CONFIG for a cluster, and optionally submits it.

    megagrpo submit my_run.yaml --cluster generic
    megagrpo submit my_run.yaml --cluster my_cluster.yaml --resume --submit

Prints an sbatch script, which --submit passes to sbatch instead. CLUSTER is a file, or the name of a shipped one. A
config named megagrpo:NAME keeps this name in the job. A path that the job would not find is an error. Needs pydantic
and PyYAML, but neither torch nor a GPU. Exit code 2: config, cluster or an option is wrong, and nothing was submitted.
docs/slurm.md describes the job.
"""

from __future__ import annotations

import argparse
import subprocess
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megagrpo.commands.arguments.config_arguments import add_config, add_resume, load, overrides
from megagrpo.config import ConfigError, RunConfig
from megagrpo.config.io import SHIPPED, config_file, shipped_clusters
from megagrpo.platform.process.terminal import warn, write_output

if TYPE_CHECKING:
    from megagrpo.cluster.launch.job import Cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megagrpo submit`."""
    add = parser.add_argument
    add_config(parser)
    add_resume(parser)
    add("--cluster", metavar="CLUSTER", help="a YAML file, or generic, pyxis, apptainer, one_gpu")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="option=value",
        help="for example --sbatch dependency=singleton",
    )
    add("--submit", action="store_true", help="pass the script to sbatch")


def run(options: argparse.Namespace) -> int:
    """Print or submit the job, and return the exit code. Raises ConfigError for a wrong config, cluster or option."""
    from megagrpo.cluster.launch.job import check_paths, cluster_file, load_cluster, place
    from megagrpo.cluster.launch.slurm import sbatch_script

    if options.cluster is None:
        raise ConfigError(
            f"--cluster: required, but missing; name a YAML file, or one of {', '.join(shipped_clusters())}"
        )
    cluster = load_cluster(cluster_file(options.cluster))
    check_image(options.cluster, cluster)
    cluster.sbatch.update(
        {name: value or True for name, _, value in (option.partition("=") for option in options.sbatch)}
    )
    config = load(options)
    placement = place(config.run.nodes, config.rollout, cluster)
    name = options.config if options.config.startswith(SHIPPED) else str(config_file(options.config).resolve())
    check_paths(config, name, cluster)
    check_plan(config, placement.world_size, cluster.gpu_memory_gb if cluster.gpus_per_node else None)
    text = sbatch_script(config, name, overrides(options), cluster, placement)
    if not options.submit:
        write_output(text)
        return 0
    try:
        return subprocess.run(["sbatch"], input=text, text=True).returncode
    except FileNotFoundError:
        raise ConfigError("sbatch: command not found; run --submit on a host with Slurm's commands") from None


def check_image(name: str, cluster: Cluster) -> None:
    """Raise ConfigError for the placeholder of a shipped cluster as image. `name` names the cluster."""
    from megagrpo.cluster.launch.job import cluster_file

    image = cluster.container.image if cluster.container else ""
    if image.partition("/")[0].endswith(".example"):  # no registry has this suffix (RFC 2606)
        fix = f"copy {cluster_file(name)}, name your image in the copy, and pass it to --cluster"
        raise ConfigError(f"container.image: {image} is a placeholder; {fix}")


def check_plan(config: RunConfig, world_size: int, gpu_memory_gb: float | None) -> None:
    """Raise ConfigError when the run cannot start. A model that this host cannot see only gives a warning; the job's
    plan checks it."""
    from megagrpo.families.weight_sources import UnseenModel
    from megagrpo.planner.rules.plan_problems import check

    package = config.model.path.removeprefix("package:")
    try:
        if package != config.model.path and find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
        problems = check(config, world_size, gpu_memory_gb).problems
    except ModuleNotFoundError as error:  # models from the hub or a package need more packages than this script
        problems = [
            UnseenModel(("model.path",), f"{config.model.path} needs {error.name}, which is not installed on this host")
        ]
    unseen = [problem for problem in problems if isinstance(problem, UnseenModel)]
    for problem in unseen:
        warn(f"not checked on this host: {problem}")
    if problems != unseen:
        raise ConfigError("\n".join(str(problem) for problem in problems if problem not in unseen))
