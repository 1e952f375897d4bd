"""Writes a run as a Kubernetes JobSet: `launch/jobset.yaml` with the values of the run. No value passes a shell.

Servers on several nodes each are a LeaderWorkerSet beside it. Its controller restarts the nodes of one server together,
and leaves the trainer and the other servers alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megagrpo.cluster.launch.job import Cluster, Placement, job_folder
from megagrpo.config import ConfigError, RunConfig
from megagrpo.config.io import shipped_folder

PORT, SERVER_PORT, BOARD_PORT = 29400, 8000, 29600
GROUP_LEADER, GROUP_INDEX = "$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)"  # the controller sets them in each pod
MAX_JOBSET_NAME = 40  # characters; a pod's name, which adds suffixes, may have 63
GRACE_SECONDS_SPARE = 60  # in addition to the cluster's lead_seconds, to stop servers and flush logs


def manifest(
    config: RunConfig, config_name: str, overrides: Sequence[str], cluster: Cluster, placement: Placement
) -> str:
    """Return the manifest, YAML of one or two documents. Raises ConfigError for what Kubernetes does not support.

    Servers listen on fixed ports and pods have DNS names in their set's subdomain: their addresses are predictable.
    """
    if placement.server_nodes and placement.first_server_gpu:
        raise ConfigError(
            "rollout.servers: on Kubernetes servers must fill whole nodes, without ranks; change servers or run.nodes"
        )
    name = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower())[:MAX_JOBSET_NAME].strip("-")
    if not name[0].isalpha():
        raise ConfigError(
            f"run.name: {config.run.name} must start with a letter, as Kubernetes requires; use another name"
        )
    trainer, servers = _arguments(name, config, config_name, overrides, placement)
    groups = placement.nodes_per_server > 1
    jobset = _jobset(name, cluster, placement, trainer, servers)
    if placement.server_nodes and not groups:
        return yaml.safe_dump(jobset, sort_keys=False)
    pod = jobset["spec"]["replicatedJobs"].pop()["template"]["spec"]["template"]
    documents = [jobset, *([_server_groups(f"{name}-servers", placement, pod)] if groups else [])]
    return yaml.safe_dump_all(documents, sort_keys=False)


def _arguments(
    name: str, config: RunConfig, config_name: str, overrides: Sequence[str], placement: Placement
) -> tuple[list[str], list[str]]:
    """Return the arguments of the trainer's nodes and of the servers' nodes."""
    words = [_literal(word) for word in (config_name, *overrides)]
    trainer = ["--nodes", str(placement.trainer_nodes), "--ranks", str(placement.ranks_per_node)]
    trainer += ["--master", f"{name}-trainer-0-0.{name}:{PORT}"]
    trainer += ["--logs", _literal(f"{config.run.output_dir}/{config.run.name}.logs"), *words]
    servers = [*words, f"rollout.servers={placement.servers_per_node}", f"rollout.port={SERVER_PORT}"]
    groups = placement.nodes_per_server > 1
    heads = [
        f"{name}-servers-{index}.{name}-servers" if groups else f"{name}-servers-0-{index}.{name}"
        for index in range(placement.server_nodes // placement.nodes_per_server)
    ]
    if heads:
        urls = ",".join(
            f"http://{h}:{SERVER_PORT + server}" for h in heads for server in range(placement.servers_per_node)
        )
        seconds = f"{config.rollout.startup_timeout:g}"
        trainer += ["rollout.placement=external", f"rollout.urls=[{urls}]", f"rollout.reconnect_timeout={seconds}"]
        trainer += ["--wait-seconds", seconds, "--wait-for", urls]
    if groups:
        servers += ["--head", f"{GROUP_LEADER}:{BOARD_PORT}", "--node", GROUP_INDEX]
    return trainer, servers


def _jobset(
    name: str, cluster: Cluster, placement: Placement, trainer: Sequence[str], servers: Sequence[str]
) -> dict[str, Any]:
    """Return the JobSet of the template, filled with these arguments."""
    assert cluster.container is not None, "a cluster with storage_claim has a container"
    filled: dict[str, Any] = _filled(
        yaml.safe_load((shipped_folder("launch") / "jobset.yaml").read_text()),
        {
            "name": name,
            "restarts": cluster.restarts,
            "trainer nodes": placement.trainer_nodes,
            "server nodes": placement.server_nodes,
            "grace seconds": cluster.lead_seconds + GRACE_SECONDS_SPARE,
            "storage claim": cluster.storage_claim,
            "storage path": cluster.storage_path,
            "secret": f"{name}-token",
            "image": cluster.container.image,
            "folder": str(job_folder()),
            "python": _literal(cluster.python),
            "trainer": trainer,
            "servers": servers,
            "job": f"kubernetes-{name}",
            "variables": [{"name": key, "value": _literal(value)} for key, value in cluster.variables.items()],
            "gpus": {"nvidia.com/gpu": cluster.gpus_per_node} if cluster.gpus_per_node else {},
        },
    )
    return filled


def _server_groups(name: str, placement: Placement, pod: dict[str, Any]) -> dict[str, Any]:
    """Return a LeaderWorkerSet: one group of pods per server, each pod on a node of its own."""
    pod["spec"]["restartPolicy"] = "Always"  # the only one that its stateful sets permit
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": placement.server_nodes // placement.nodes_per_server,
            "leaderWorkerTemplate": {
                "size": placement.nodes_per_server,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": pod,
            },
        },
    }


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a part of the template in which each text `<key>` is the value of `key`. A value stays as it is;
    a list continues the list that holds it."""
    if isinstance(part, dict):
        return {key: _filled(value, values) for key, value in part.items()}
    if isinstance(part, list):
        filled = [_filled(value, values) for value in part]
        return [one for value in filled for one in (value if isinstance(value, list) else [value])]
    return copy.deepcopy(values[part[1:-1]]) if isinstance(part, str) and part.startswith("<") else part


def _literal(word: str) -> str:
    """Escape a word of a command, so that Kubernetes expands no variable in it."""
    return word.replace("$", "$$")
