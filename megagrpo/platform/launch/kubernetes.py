"""Writes a run as a Kubernetes JobSet: an indexed Job for the trainer's nodes and one for the servers' nodes. No value
passes a shell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from megagrpo.config import ConfigError, RunConfig
from megagrpo.platform.launch.job import Cluster, Placement, job_folder
from megagrpo.platform.process.variables import TOKEN_FILE_VARIABLE

PORT, SERVER_PORT, BOARD_PORT = 29400, 8000, 29600
LONGEST_NAME = 40  # characters; a pod's name, which adds suffixes, may have 63
GRACE_SECONDS_SPARE = 60  # in addition to the cluster's lead_seconds, to stop servers and flush logs


def manifest(
    config: RunConfig, config_name: str, overrides: Sequence[str], cluster: Cluster, placement: Placement
) -> str:
    """Return the manifest as YAML. Raises ConfigError for a cluster or a run that Kubernetes does not support.

    Pods mount the claim `storage_claim` and the secret NAME-token. Servers listen on fixed ports, and pods have DNS
    names in the JobSet's subdomain, so the servers' addresses are known in advance.
    """
    if placement.server_nodes and placement.first_server_gpu:
        raise ConfigError(
            "rollout.servers: on Kubernetes servers must fill whole nodes, without ranks; change servers or run.nodes"
        )
    name = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower())[:LONGEST_NAME].strip("-")
    if not name[0].isalpha():
        raise ConfigError(
            f"run.name: {config.run.name} must start with a letter, as Kubernetes requires; use another name"
        )
    urls = [
        f"http://{name}-servers-0-{node}.{name}:{SERVER_PORT + server}"
        for node in range(0, placement.server_nodes, placement.nodes_per_server)
        for server in range(placement.servers_per_node)
    ]
    run = [_literal(word) for word in (config_name, *overrides)]
    trainer = [
        "-m",
        "megagrpo.platform.launch.node",
        "--nodes",
        str(placement.trainer_nodes),
        "--ranks",
        str(placement.ranks_per_node),
    ]
    trainer += [
        "--master",
        f"{name}-trainer-0-0.{name}:{PORT}",
        "--logs",
        _literal(f"{config.run.output_dir}/{config.run.name}.logs"),
        *run,
    ]
    if urls:
        trainer += [
            "rollout.placement=external",
            f"rollout.urls=[{','.join(urls)}]",
            f"rollout.reconnect_timeout={config.rollout.startup_timeout:g}",
            "--wait-seconds",
            f"{config.rollout.startup_timeout:g}",
        ]
        trainer += ["--wait-for", ",".join(urls)]
    jobs = [_job("trainer", placement.trainer_nodes, trainer, name, cluster)]
    if placement.server_nodes:
        serve = [
            "-m",
            "megagrpo",
            "serve",
            *run,
            f"rollout.servers={placement.servers_per_node}",
            f"rollout.port={SERVER_PORT}",
        ]
        if placement.nodes_per_server > 1:
            heads = range(0, placement.server_nodes, placement.nodes_per_server)
            serve += ["--head", ",".join(f"{name}-servers-0-{node}.{name}:{BOARD_PORT}" for node in heads)]
        jobs.append(_job("servers", placement.server_nodes, [*serve, "--reach", "$(POD_IP)"], name, cluster))
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
            "failurePolicy": {
                "maxRestarts": cluster.restarts,
                "rules": [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": jobs,
        },
    }
    return yaml.safe_dump(jobset, sort_keys=False)


def _literal(word: str) -> str:
    """Escape a word of a command, so that Kubernetes expands no variable in it."""
    return word.replace("$", "$$")


def _job(role: str, nodes: int, command: list[str], name: str, cluster: Cluster) -> dict[str, Any]:
    """Return a Job with one pod on each of `nodes`. A failed pod fails its Job; the JobSet then restarts all pods."""
    assert cluster.container is not None, "`load_cluster` requires a container"
    gpus = {"nvidia.com/gpu": cluster.gpus_per_node} if cluster.gpus_per_node else {}
    env = {
        "PYTHONPATH": ".",
        "PYTHONUNBUFFERED": "1",
        "MEGAGRPO_JOB": f"kubernetes-{name}",
        TOKEN_FILE_VARIABLE: "/secret/token",
    }
    env |= {key: _literal(value) for key, value in cluster.env.items()}
    if cluster.interface:
        env |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), _literal(cluster.interface))
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    mounts = [("shared", cluster.storage_path), ("secret", "/secret"), ("memory", "/dev/shm")]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.lead_seconds + GRACE_SECONDS_SPARE,
        "containers": [
            {
                "name": role,
                "image": cluster.container.image,
                "workingDir": str(job_folder()),
                "command": [_literal(cluster.python), *command],
                "env": [address, *({"name": key, "value": value} for key, value in env.items())],
                "resources": {"limits": gpus},
                "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts],
            }
        ],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": cluster.storage_claim}},
            {"name": "secret", "secret": {"secretName": f"{name}-token", "defaultMode": 0o400}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    spec = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    if role == "trainer":  # exit code 2 of the trainer is a config error, so nothing is restarted
        mistake = {"action": "FailJob", "onExitCodes": {"containerName": role, "operator": "In", "values": [2]}}
        spec["podFailurePolicy"] = {"rules": [mistake]}
    return {"name": role, "replicas": 1, "template": {"spec": spec}}
