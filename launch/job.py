"""What a job asks of a cluster: the cluster's description, and which nodes run ranks and which run vLLM servers."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from megagrpo.config import ConfigError, RunConfig

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|(API|ACCESS|SECRET)_KEY)$", re.IGNORECASE)  # as HF_TOKEN and WANDB_API_KEY


@dataclass(frozen=True)
class Container:
    """Where commands run when not on the node itself. `mounts` are `HOST:INSIDE[:ro]`; the repository and the run folder must be in one of
    them under the same name as outside."""

    image: str
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """A file of `launch/clusters`. `sbatch` holds more options of sbatch by their long names; `setup` are lines of shell, run as they are
    on the first node before anything else; `env` are variables, no secrets; `interface` is the network interface of NCCL and gloo."""

    gpus_per_node: int = 8
    ranks_per_node: int = 1  # without GPUs
    gpu_memory_gb: float | None = None  # GiB that a GPU has, for the plan
    python: str = ".venv/bin/python"
    sbatch: dict[str, Any] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    interface: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    container: Container | None = None
    restarts: int = 10  # of one job, after preemption or at its time limit
    restart_failed: bool = False  # also after a failure, as of a GPU or the network, but for mistakes in the config
    lead_seconds: int = 60  # before the time limit Slurm says so, if the trainer has not stopped by itself; Kubernetes: until SIGKILL
    storage_claim: str | None = None  # Kubernetes: the volume that all nodes share
    storage_path: str = "/shared"  # and where it is mounted


def load_cluster(path: str | Path) -> Cluster:
    """The description in a YAML file. ConfigError with every problem."""
    try:
        raw = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold keys and values")
    container = raw.pop("container", None)
    problems = _problems(raw, Cluster, "")
    if container is not None:
        problems += _problems(container, Container, "container.") if isinstance(container, dict) else ["container: must hold an image"]
        if isinstance(container, dict) and not problems:
            if not isinstance(container.get("image"), str):
                problems.append("container.image: is missing; name an image")
            if container.get("runtime", "pyxis") not in ("pyxis", "apptainer"):
                problems.append(f"container.runtime: {container['runtime']}; choose pyxis or apptainer")
    for key, low in (("gpus_per_node", 0), ("ranks_per_node", 1), ("restarts", 0), ("lead_seconds", 1)):
        if isinstance(raw.get(key, low), int) and raw.get(key, low) < low:
            problems.append(f"{key}: {raw[key]} is too small; at least {low}")
    for name in raw["env"] if isinstance(raw.get("env"), dict) else ():
        if not ENVIRONMENT_NAME.fullmatch(str(name)):
            problems.append(f"env: {name!r} is no name of an environment variable; use letters, digits and _")
        elif SECRET_NAME.search(name):
            problems.append(f"env: {name} would stand in the job for others to read; `export` it where you submit, or read it in `setup`")
    if problems:
        raise ConfigError("\n".join([f"{path}: {len(problems)} problem(s)", *(f"  {problem}" for problem in problems)]))
    if container is not None:
        raw["container"] = Container(**container | {"mounts": tuple(container.get("mounts", ()))})
    if "env" in raw:
        raw["env"] = {name: str(value) for name, value in raw["env"].items()}
    return Cluster(**raw | {"setup": tuple(raw.get("setup", ()))})


def _problems(raw: dict[str, Any], into: type[Cluster | Container], prefix: str) -> list[str]:
    kinds = {f.name: str(f.type) for f in fields(into)}  # annotations are strings in this file
    problems = []
    for key, value in raw.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, 1)
            fix = f"did you mean {prefix}{near[0]}?" if near else f"one of {', '.join(kinds)}"
            problems.append(f"{prefix}{key}: unknown key; {fix}")
        elif not _fits(value, kinds[key]):
            problems.append(f"{prefix}{key}: {value!r} is of another kind than {kinds[key]}")
    return problems


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return "None" in kind
    if kind == "bool":
        return isinstance(value, bool)
    for name, types in (("int", int), ("float", (int, float)), ("str", str), ("Literal", str), ("dict", dict), ("tuple", list)):
        if kind.startswith(name):
            return isinstance(value, types) and not isinstance(value, bool)
    return True


@dataclass(frozen=True)
class Placement:
    """`trainer_nodes` are the first nodes, `server_nodes` the last; they may overlap. Servers on nodes of their own have all GPUs of these,
    on others those from `first_server_gpu` on. `server_nodes` 0: the trainer starts its servers, or somebody else has."""

    nodes: int
    trainer_nodes: int
    ranks_per_node: int
    server_nodes: int = 0
    servers_per_node: int = 0
    first_server_gpu: int = 0

    @property
    def world_size(self) -> int:
        """Ranks of the trainer."""
        return self.trainer_nodes * self.ranks_per_node


def place(config: RunConfig, cluster: Cluster) -> Placement:
    """Who runs where. ConfigError when servers do not fill their nodes evenly, or leave none to the trainer."""
    nodes, gpus, r = config.run.nodes, cluster.gpus_per_node, config.rollout
    needed = r.servers * r.tp
    if r.placed == "external":
        return Placement(nodes, nodes, gpus or cluster.ranks_per_node)
    if nodes == 1:
        own = needed if gpus and r.placed == "dedicated" else 0
        if gpus and needed > gpus:
            raise ConfigError(f"rollout.servers: {r.servers} x rollout.tp {r.tp} need {needed} GPUs, and the node has {gpus}; lower one")
        if gpus and own >= gpus:
            raise ConfigError(
                f"rollout.servers: {r.servers} x rollout.tp {r.tp} take all {gpus} GPUs of the node; leave one to the trainer"
            )
        return Placement(1, 1, gpus - own if gpus else cluster.ranks_per_node)
    if not gpus:
        if r.servers > nodes and r.servers % nodes:
            raise ConfigError(f"rollout.servers: {r.servers} cannot be shared out evenly over run.nodes {nodes}; use a multiple")
        hosts = min(r.servers, nodes)
        return Placement(nodes, nodes, cluster.ranks_per_node, hosts, r.servers // hosts)
    if r.tp > gpus:
        raise ConfigError(f"rollout.tp: a server of {r.tp} GPUs does not fit a node of {gpus}, and none spans nodes; at most {gpus}")
    hosts, rest = divmod(r.servers, gpus // r.tp)
    if gpus % r.tp == 0 and rest == 0 and hosts < nodes:
        return Placement(nodes, nodes - hosts, gpus, hosts, gpus // r.tp)
    each, rest = divmod(r.servers, nodes)
    if rest == 0 and each * r.tp < gpus:
        return Placement(nodes, nodes, gpus - each * r.tp, nodes, each, first_server_gpu=gpus - each * r.tp)
    whole = [n * (gpus // r.tp) for n in range(1, nodes)] if gpus % r.tp == 0 else []
    shared = [n * nodes for n in range(1, (gpus - 1) // r.tp + 1)]
    fitting = ", ".join(str(n) for n in sorted({*whole, *shared}, key=lambda n: (abs(n - r.servers), n))[:2]) or "none"
    raise ConfigError(
        f"rollout.servers: {r.servers} x rollout.tp {r.tp} GPUs neither fill whole nodes of {gpus} GPUs and leave one to the trainer, "
        f"nor as many on each of run.nodes {nodes}; nearest: {fitting}"
    )
