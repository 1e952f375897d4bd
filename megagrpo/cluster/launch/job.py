"""Reads a cluster's description, and assigns a job's nodes to ranks and vLLM servers."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megagrpo.config import ConfigError, Problem, ProblemError, RolloutSection, RunConfig
from megagrpo.config.basics.paths import paths_in
from megagrpo.config.io import (
    SHIPPED,
    config_file,
    read_yaml,
    shipped_clusters,
    shipped_configs,
    validated_as,
)
from megagrpo.config.sections.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# as HF_TOKEN and WANDB_API_KEY
SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|(API|ACCESS|SECRET)_KEY)$", re.IGNORECASE)


def job_folder() -> Path:
    """Return the working folder of a job: the clone that megagrpo runs from, else the current folder."""
    clone = Path(__file__).resolve().parents[3]
    return clone if (clone / "launch" / "local.sh").is_file() else Path.cwd()


def job_python() -> str:
    """Return a job's Python without a container: the clone's .venv if it exists, else this command's Python."""
    clone_python = ".venv/bin/python"
    return clone_python if (job_folder() / clone_python).exists() else sys.executable


class Container(Section):
    """The container in which commands run. `mounts` are `HOST:INSIDE[:ro]`; the job's folder and every path of the
    config must be mounted under their host paths (`check_paths`)."""

    image: str
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()


class Cluster(Section):
    """A file of `launch/clusters`."""

    gpus_per_node: NonNegativeInt = 8
    ranks_per_node: PositiveInt | None = None
    """None: one for each GPU that no server uses; without GPUs 1. Fewer leave GPUs spare."""
    gpu_memory_gb: PositiveFloat | None = None
    """GiB of a GPU, for the plan."""
    python: str = Field(default_factory=job_python)
    """The Python of the job, relative to its working folder."""
    sbatch: dict[str, Any] = Field({})
    """Additional sbatch options: long name -> value."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run on the first node before anything else."""
    interface: str | None = None
    """The network interface of NCCL and gloo."""
    env: dict[str, str] = Field({})
    """Environment variables, without secrets."""
    container: Container | None = None
    restarts: NonNegativeInt = 10
    """Restarts of one job, after preemption or at its time limit."""
    restart_failed: bool = False
    """Restart also after a failure, for example of a GPU or the network, but not after a config error."""
    lead_seconds: PositiveInt = 60
    """Seconds from SIGUSR1 to the time limit, if the trainer still runs."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of `interface` and `env`."""
        named = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if self.interface else ()
        return {**dict.fromkeys(named, self.interface or ""), **self.env}

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_as_text(cls, env: Any) -> Any:
        return {name: str(value) for name, value in env.items()} if isinstance(env, dict) else env

    @model_validator(mode="after")
    def _check_variables_and_container(self) -> Cluster:
        problems = []
        for name in self.env:
            if not VARIABLE_NAME.fullmatch(name):
                fix = f"{name!r} is not a valid name of an environment variable; use letters, digits and _"
                problems.append(Problem(("env",), fix))
            elif SECRET_VARIABLE.search(name):
                fix = "`export` it where you submit, or read it in `setup`"
                problems.append(Problem(("env",), f"{name} would expose a secret in the job script; {fix}"))
        if problems:
            raise ProblemError(*problems)
        return self


def cluster_file(name: str) -> Path:
    """Return a cluster's file, from a path or a shipped file's stem. Raises ConfigError for an unknown name."""
    shipped = shipped_clusters()
    if Path(name).exists() or not re.fullmatch(r"[\w-]+", name):
        return config_file(name)
    if name not in shipped:
        known = ", ".join(shipped)
        raise ConfigError(
            f"--cluster: {name} is neither a file nor a shipped cluster; name a YAML file, or one of {known}"
        )
    return shipped[name]


def load_cluster(path: str | Path) -> Cluster:
    """Return the description in a YAML file. Raises ConfigError that lists every problem."""
    return validated_as(Cluster, read_yaml(path), path)


def check_paths(config: RunConfig, config_name: str, cluster: Cluster) -> None:
    """Raise ConfigError for each path of the job that no mount of the cluster's container holds under the same path.

    Files of a shipped config are not checked: every image has them.
    """
    container = cluster.container
    if container is None:
        return
    flags: dict[Path, list[str]] = {}  # of a folder that the container holds under the same path
    for source, inside, *rest in (mount.split(":") if ":" in mount else (mount, mount) for mount in container.mounts):
        if source == inside:
            flags[Path(source)] = rest
    if container.runtime == "apptainer":
        flags.setdefault(Path.home(), [])  # apptainer mounts it by default

    def is_held(key: str, path: Path) -> bool:
        holders = [flags[folder] for folder in (path, *path.parents) if folder in flags]
        return any(key != "run.output_dir" or "ro" not in options for options in holders)

    absolute = [(key, os.path.abspath(path)) for key, path in _job_paths(config, config_name, cluster)]
    if outside := [f"  {key}: {path}" for key, path in absolute if not is_held(key, Path(path))]:
        what = (
            f"container.mounts: no mount of the container holds these paths of the job under the same path (mounts: "
            f"{', '.join(container.mounts) or 'none'})"
        )
        raise ConfigError(
            "\n".join([f"{what}; move them below a mount and submit from there, or add FOLDER:FOLDER", *outside])
        )


def _job_paths(config: RunConfig, config_name: str, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of what a job reads and writes, without shipped configs."""
    root, shipped = job_folder(), shipped_configs().resolve()
    for key, path in paths_in(config):
        if key != "run.output_dir" and shipped not in Path(path).resolve().parents:
            yield key, path
    yield "run.output_dir", str(root / config.run.output_dir)
    yield "the job's folder", str(root)
    if not config_name.startswith(SHIPPED):
        yield "CONFIG", config_name
    if cluster.python == sys.executable:
        yield "python", cluster.python


@dataclass(frozen=True)
class Placement:
    """The nodes of ranks and servers. The first `trainer_nodes` nodes run ranks, the last `server_nodes` run servers;
    both may overlap. A node without ranks gives servers its first GPUs, a shared node those from `first_server_gpu` on.
    GPUs may be left spare. With `server_nodes` 0 the job starts no servers: the trainer does, or they are external.
    With `nodes_per_server` above 1 each server has that many consecutive nodes to itself."""

    nodes: int
    trainer_nodes: int
    ranks_per_node: int
    server_nodes: int = 0
    servers_per_node: int = 0
    first_server_gpu: int = 0
    nodes_per_server: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks of the trainer."""
        return self.trainer_nodes * self.ranks_per_node


def place(nodes: int, rollout: RolloutSection, cluster: Cluster) -> Placement:
    """Return which of `nodes` run ranks and servers, with `ranks_per_node` ranks on each node if the cluster names it.

    Raises ConfigError when servers cannot be spread evenly or leave the trainer no GPU or fewer than `ranks_per_node`.
    """
    gpus, ranks = cluster.gpus_per_node, cluster.ranks_per_node
    if not gpus:
        return _place_without_gpus(nodes, rollout, ranks or 1)
    placed = _place_on_gpus(nodes, rollout, gpus)
    if ranks is not None and ranks > placed.ranks_per_node:
        raise ConfigError(
            f"ranks_per_node: {ranks} ranks need a GPU each, but rollout.servers leaves {placed.ranks_per_node} of "
            f"{gpus}; lower one"
        )
    return replace(placed, ranks_per_node=ranks or placed.ranks_per_node)


def _place_without_gpus(nodes: int, r: RolloutSection, ranks: int) -> Placement:
    """Return a placement in which ranks and servers share the cores of their nodes."""
    if r.placed != "external" and r.nodes_per_server > 1:
        hosts = r.servers * r.nodes_per_server
        return Placement(nodes, nodes, ranks, hosts, 1, nodes_per_server=r.nodes_per_server)
    if r.placed != "dedicated" or nodes == 1:
        return Placement(nodes, nodes, ranks)
    if r.servers > nodes and r.servers % nodes:
        raise ConfigError(f"rollout.servers: {r.servers} is not a multiple of run.nodes {nodes}; use a multiple")
    hosts = min(r.servers, nodes)
    return Placement(nodes, nodes, ranks, hosts, r.servers // hosts)


def _place_on_gpus(nodes: int, r: RolloutSection, gpus: int) -> Placement:
    """Return a placement with a rank for each GPU that no server uses."""
    servers, size = f"rollout.servers: {r.servers} x {r.server_text}", r.devices_per_server
    if r.placed == "external":
        return Placement(nodes, nodes, gpus)
    if r.nodes_per_server > 1:
        return _place_spanning(nodes, r, gpus)
    if r.placed == "colocated":
        if (needed := r.servers // nodes * size) > gpus:
            raise ConfigError(f"{servers} on {nodes} node(s) need {needed} GPUs of each, which has {gpus}; lower one")
        return Placement(nodes, nodes, gpus)
    if nodes == 1:
        if (needed := r.servers * size) >= gpus:
            raise ConfigError(f"{servers} take {needed} of the node's {gpus} GPUs; leave one to the trainer")
        return Placement(1, 1, gpus - needed)
    if size > gpus:
        raise ConfigError(
            f"rollout.tp: a server of {size} GPUs ({r.server_text}) does not fit on a node of {gpus}; lower one, or "
            f"set rollout.nodes_per_server to {-(-size // gpus)} or more"
        )
    if placed := _place_dedicated(nodes, r.servers, size, gpus):
        return placed
    fitting = (n for n in range(1, nodes * gpus) if _place_dedicated(nodes, n, size, gpus))
    nearest = sorted(fitting, key=lambda n: (abs(n - r.servers), n))[:2]
    raise ConfigError(
        f"{servers} GPUs cannot be spread evenly over nodes of {gpus} GPUs that leave a node to the trainer, or over "
        f"all of run.nodes {nodes}; nearest: {', '.join(map(str, nearest)) or 'none'}"
    )


def _place_dedicated(nodes: int, servers: int, size: int, gpus: int) -> Placement | None:
    """Return the first placement that spreads `servers` of `size` GPUs each evenly; None if there is none."""
    hosts, rest = divmod(servers, gpus // size)
    if gpus % size == 0 and rest == 0 and hosts < nodes:
        return Placement(nodes, nodes - hosts, gpus, hosts, gpus // size)
    each, rest = divmod(servers, nodes)
    if rest == 0 and each * size < gpus:
        return Placement(nodes, nodes, gpus - each * size, nodes, each, first_server_gpu=gpus - each * size)
    for hosts in range(1, nodes):  # whole nodes of servers, with spare GPUs
        each, rest = divmod(servers, hosts)
        if rest == 0 and each * size <= gpus:
            return Placement(nodes, nodes - hosts, gpus, hosts, each)
    return None


def _place_spanning(nodes: int, r: RolloutSection, gpus: int) -> Placement:
    """Return the nodes of ranks, and of servers on several nodes each."""
    hosts = r.servers * r.nodes_per_server
    if r.devices_per_node > gpus:
        raise ConfigError(
            f"rollout.nodes_per_server: {r.nodes_per_server} nodes give a server {r.nodes_per_server * gpus} GPUs, but "
            f"{r.server_text} need {r.devices_per_server}; raise it, or lower one of the sizes"
        )
    if hosts >= nodes:
        raise ConfigError(
            f"rollout.servers: {r.servers} x rollout.nodes_per_server {r.nodes_per_server} take all of run.nodes "
            f"{nodes}; leave a node to the trainer"
        )
    return Placement(nodes, nodes - hosts, gpus, hosts, 1, nodes_per_server=r.nodes_per_server)
