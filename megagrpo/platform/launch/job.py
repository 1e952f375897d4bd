"""Reads a cluster's description, and assigns a job's nodes to ranks and vLLM servers."""

from __future__ import annotations

import difflib
import os
import re
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from megagrpo.config import ConfigError, RunConfig
from megagrpo.config.io import CLUSTERS, SHIPPED, shipped_configs
from megagrpo.config.paths import paths_in

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# as HF_TOKEN and WANDB_API_KEY
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|(API|ACCESS|SECRET)_KEY)$", re.IGNORECASE)


def job_folder() -> Path:
    """Return the working folder of a job: the clone that megagrpo runs from, else the current folder."""
    clone = Path(__file__).resolve().parents[3]
    return clone if (clone / "launch" / "local.sh").is_file() else Path.cwd()


def job_python() -> str:
    """Return the Python of a job without a container: the clone's .venv if it exists, else the Python that runs this
    command."""
    own = ".venv/bin/python"
    return own if (job_folder() / own).exists() else sys.executable


@dataclass(frozen=True)
class Container:
    """The container in which commands run. `mounts` are `HOST:INSIDE[:ro]`; the job's folder and every path of the
    config must be mounted under their host paths (`check_paths`)."""

    image: str
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """A file of `configs/clusters`. `sbatch` maps long names of additional sbatch options to values. `setup` are shell
    lines that run on the first node before anything else. `env` are environment variables, without secrets. `interface`
    is the network interface of NCCL and gloo."""

    gpus_per_node: int = 8
    # None: one for each GPU that no server uses; without GPUs 1. Fewer leave GPUs spare
    ranks_per_node: int | None = None
    gpu_memory_gb: float | None = None  # GiB of a GPU, for the plan
    python: str = field(default_factory=job_python)  # relative to the job's working folder
    sbatch: dict[str, Any] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    interface: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    container: Container | None = None
    restarts: int = 10  # of one job, after preemption or at its time limit
    # restart also after a failure, for example of a GPU or the network, but not after a config error
    restart_failed: bool = False
    # Slurm: seconds from SIGUSR1 to the time limit, if the trainer still runs; Kubernetes: until SIGKILL
    lead_seconds: int = 60
    storage_claim: str | None = None  # claim of the volume that all nodes share; makes the cluster one of Kubernetes
    storage_path: str = "/shared"  # Kubernetes: mount path of that volume


def cluster_file(name: str) -> Path:
    """Return the file of a cluster: a path, or the name of a shipped file without its suffix. Raises ConfigError for an
    unknown name."""
    shipped = shipped_configs() / CLUSTERS / f"{name}.yaml"
    if Path(name).exists() or not re.fullmatch(r"[\w-]+", name) or not shipped.parent.is_dir():
        return Path(name)
    if not shipped.is_file():
        known = ", ".join(shipped_clusters())
        raise ConfigError(
            f"--cluster: {name} is neither a file nor a shipped cluster; name a YAML file, or one of {known}"
        )
    return shipped


def shipped_clusters() -> list[str]:
    """Return the names of the shipped clusters."""
    return sorted(path.stem for path in (shipped_configs() / CLUSTERS).glob("*.yaml"))


def load_cluster(path: str | Path) -> Cluster:
    """Return the description in a YAML file. Raises ConfigError that lists every problem."""
    try:
        raw = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines at the top, not a {type(raw).__name__}")
    container = raw.pop("container", None)
    problems = _problems(raw, Cluster, "")
    if container is not None:
        problems += (
            _problems(container, Container, "container.")
            if isinstance(container, dict)
            else ["container: must be a mapping with `image`"]
        )
        if isinstance(container, dict) and not problems:
            if not isinstance(container.get("image"), str):
                problems.append("container.image: required, but missing; name an image")
            if container.get("runtime", "pyxis") not in ("pyxis", "apptainer"):
                problems.append(f"container.runtime: {container['runtime']}; choose pyxis or apptainer")
    if raw.get("storage_claim") and container is None:
        problems.append("container: Kubernetes (storage_claim) needs an image; set container.image")
    for key, low in (("gpus_per_node", 0), ("ranks_per_node", 1), ("restarts", 0), ("lead_seconds", 1)):
        if isinstance(raw.get(key, low), int) and raw.get(key, low) < low:
            problems.append(f"{key}: must be at least {low} (got {raw[key]})")
    for name in raw["env"] if isinstance(raw.get("env"), dict) else ():
        if not ENVIRONMENT_NAME.fullmatch(str(name)):
            problems.append(f"env: {name!r} is not a valid name of an environment variable; use letters, digits and _")
        elif SECRET_NAME.search(name):
            problems.append(
                f"env: {name} would expose a secret in the job script; `export` it where you submit, or read it in "
                f"`setup`"
            )
    if problems:
        raise ConfigError("\n".join([f"{path}: {len(problems)} problem(s)", *(f"  {problem}" for problem in problems)]))
    if container is not None:
        raw["container"] = Container(**container | {"mounts": tuple(container.get("mounts", ()))})
    if "env" in raw:
        raw["env"] = {name: str(value) for name, value in raw["env"].items()}
    return Cluster(**raw | {"setup": tuple(raw.get("setup", ()))})


def check_paths(config: RunConfig, config_name: str, cluster: Cluster) -> None:
    """Raise ConfigError that names each path of the job that no mount of the cluster's container holds under the same
    path. Files of a shipped config are not checked: every image has them."""
    root, container, shipped = job_folder(), cluster.container, shipped_configs().resolve()
    if container is None:
        return
    paths: dict[str, list[str]] = {}
    for key, path in paths_in(config):
        if shipped not in Path(path).resolve().parents:
            paths.setdefault(key, []).append(path)
    paths |= {"run.output_dir": [str(root / config.run.output_dir)], "the job's folder": [str(root)]}
    paths |= {} if config_name.startswith(SHIPPED) else {"CONFIG": [config_name]}
    paths |= {"python": [cluster.python]} if cluster.python == sys.executable else {}
    mounts = (cluster.storage_path,) if cluster.storage_claim else container.mounts
    held: dict[Path, list[str]] = {}  # folder -> flags of its mount
    for source, inside, *flags in (mount.split(":") if ":" in mount else (mount, mount) for mount in mounts):
        if source == inside:
            held[Path(source)] = flags
    if cluster.storage_claim is None and container.runtime == "apptainer":
        held.setdefault(Path.home(), [])  # apptainer mounts it by default
    outside = [
        f"  {key}: {path}"
        for key, written in paths.items()
        for path in map(os.path.abspath, written)
        if not any(
            folder in (Path(path), *Path(path).parents) and not (key == "run.output_dir" and "ro" in flags)
            for folder, flags in held.items()
        )
    ]
    if outside:
        key, fix = ("storage_path", "") if cluster.storage_claim else ("container.mounts", ", or add FOLDER:FOLDER")
        what = (
            f"{key}: no mount of the container holds these paths of the job under the same path (mounts: "
            f"{', '.join(mounts) or 'none'})"
        )
        raise ConfigError("\n".join([f"{what}; move them below a mount and submit from there{fix}", *outside]))


def _problems(raw: dict[str, Any], into: type[Cluster | Container], prefix: str) -> list[str]:
    kinds = {f.name: str(f.type) for f in fields(into)}  # annotations are strings in this file
    problems = []
    for key, value in raw.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, 1)
            fix = f"did you mean {prefix}{near[0]}?" if near else f"one of {', '.join(kinds)}"
            problems.append(f"{prefix}{key}: unknown key; {fix}")
        elif not _fits(value, kinds[key]):
            problems.append(f"{prefix}{key}: must be of type {kinds[key]} (got {value!r})")
    return problems


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return "None" in kind
    if kind == "bool":
        return isinstance(value, bool)
    for name, types in (
        ("int", int),
        ("float", (int, float)),
        ("str", str),
        ("Literal", str),
        ("dict", dict),
        ("tuple", list),
    ):
        if kind.startswith(name):
            return isinstance(value, types) and not isinstance(value, bool)
    return True


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


def place(config: RunConfig, cluster: Cluster) -> Placement:
    """Return the nodes of ranks and servers, with `ranks_per_node` ranks on each node if the cluster names it.

    Raises ConfigError when servers cannot be spread evenly, leave no GPU to the trainer, or leave fewer than
    `ranks_per_node`.
    """
    placed, wanted = _place(config, cluster), cluster.ranks_per_node
    if wanted is None or not cluster.gpus_per_node:
        return placed
    if wanted > placed.ranks_per_node:
        said = (
            f"{wanted} ranks need a GPU each, but rollout.servers leaves {placed.ranks_per_node} of "
            f"{cluster.gpus_per_node}; lower one"
        )
        raise ConfigError(f"ranks_per_node: {said}")
    return replace(placed, ranks_per_node=wanted)


def _place(config: RunConfig, cluster: Cluster) -> Placement:
    """Return the nodes of ranks and servers, with a rank for each GPU that no server uses."""
    ranks_without_gpus = cluster.ranks_per_node or 1
    nodes, gpus, r = config.run.nodes, cluster.gpus_per_node, config.rollout
    size = r.devices_per_server
    needed = r.servers * size
    if r.placed == "external":
        return Placement(nodes, nodes, gpus or ranks_without_gpus)
    if r.nodes_per_server > 1:
        return _place_spanning(config, gpus, ranks_without_gpus)
    if r.placed == "colocated" and nodes > 1:
        if gpus and r.servers // nodes * size > gpus:
            said = (
                f"{r.servers} x {r.server_text} on {nodes} nodes need {r.servers // nodes * size} GPUs of each, "
                f"which has {gpus}"
            )
            raise ConfigError(f"rollout.servers: {said}; lower one")
        return Placement(nodes, nodes, gpus or ranks_without_gpus)
    if nodes == 1:
        own = needed if gpus and r.placed == "dedicated" else 0
        if gpus and needed > gpus:
            raise ConfigError(
                f"rollout.servers: {r.servers} x {r.server_text} need {needed} GPUs, but the node has {gpus}; lower one"
            )
        if gpus and own >= gpus:
            raise ConfigError(
                f"rollout.servers: {r.servers} x {r.server_text} take all {gpus} GPUs of the node; leave one to the "
                f"trainer"
            )
        return Placement(1, 1, gpus - own if gpus else ranks_without_gpus)
    if not gpus:
        if r.servers > nodes and r.servers % nodes:
            raise ConfigError(f"rollout.servers: {r.servers} is not a multiple of run.nodes {nodes}; use a multiple")
        hosts = min(r.servers, nodes)
        return Placement(nodes, nodes, ranks_without_gpus, hosts, r.servers // hosts)
    if size > gpus:
        fix = f"lower one, or set rollout.nodes_per_server to {-(-size // gpus)} or more"
        raise ConfigError(
            f"rollout.tp: a server of {size} GPUs ({r.server_text}) does not fit on a node of {gpus}; {fix}"
        )
    hosts, rest = divmod(r.servers, gpus // size)
    if gpus % size == 0 and rest == 0 and hosts < nodes:
        return Placement(nodes, nodes - hosts, gpus, hosts, gpus // size)
    each, rest = divmod(r.servers, nodes)
    if rest == 0 and each * size < gpus:
        return Placement(nodes, nodes, gpus - each * size, nodes, each, first_server_gpu=gpus - each * size)
    for hosts in range(1, nodes):  # whole nodes of servers, with spare GPUs
        each, rest = divmod(r.servers, hosts)
        if rest == 0 and each * size <= gpus:
            return Placement(nodes, nodes - hosts, gpus, hosts, each)
    whole = [n * each for n in range(1, nodes) for each in range(1, gpus // size + 1)]
    shared = [n * nodes for n in range(1, (gpus - 1) // size + 1)]
    fitting = ", ".join(str(n) for n in sorted({*whole, *shared}, key=lambda n: (abs(n - r.servers), n))[:2]) or "none"
    raise ConfigError(
        f"rollout.servers: {r.servers} x {r.server_text} GPUs cannot be spread evenly over nodes of {gpus} GPUs that "
        f"leave a node to the "
        f"trainer, or over all of run.nodes {nodes}; nearest: {fitting}"
    )


def _place_spanning(config: RunConfig, gpus: int, ranks_without_gpus: int) -> Placement:
    """Return the nodes of ranks and of servers on several nodes each. On nodes without GPUs ranks and servers share the
    cores."""
    nodes, r = config.run.nodes, config.rollout
    hosts = r.servers * r.nodes_per_server
    if not gpus:
        return Placement(nodes, nodes, ranks_without_gpus, hosts, 1, nodes_per_server=r.nodes_per_server)
    if r.devices_per_node > gpus:
        said = (
            f"{r.nodes_per_server} nodes give a server {r.nodes_per_server * gpus} GPUs, but {r.server_text} need "
            f"{r.devices_per_server}"
        )
        raise ConfigError(f"rollout.nodes_per_server: {said}; raise it, or lower one of the sizes")
    if hosts >= nodes:
        said = (
            f"{r.servers} x rollout.nodes_per_server {r.nodes_per_server} take all of run.nodes {nodes}; leave a "
            f"node to the trainer"
        )
        raise ConfigError(f"rollout.servers: {said}")
    return Placement(nodes, nodes - hosts, gpus, hosts, 1, nodes_per_server=r.nodes_per_server)
