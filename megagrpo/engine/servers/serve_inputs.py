"""What `megagrpo serve` checks before it imports torch and vLLM, which takes a minute on a busy machine, and how it
reports its start to a job."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megagrpo.config import ConfigError, RolloutSection
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform.process.access_token import read_token
from megagrpo.platform.process.atomic_file import write_atomically
from megagrpo.platform.process.variables import ENVIRONMENT, NODE_INDICES


@dataclass(frozen=True)
class Place:
    """This node's index among the nodes of its server, and the address of the first node's store."""

    index: int
    host: str
    port: int


def check_inputs(
    rollout: RolloutSection, model_path: str, heads: str | None, node: int | None
) -> tuple[str, Place | None]:
    """Return the servers' token, and with `heads` the result of `place_of`. Raises ValueError when there is no token,
    no model in the folder `model_path`, or `heads` does not fit `rollout.nodes_per_server`."""
    token = read_token(rollout.token_file)
    if token is None:
        raise ValueError(
            "rollout.token_file: servers for a remote trainer need its token; `openssl rand -hex 32` makes one"
        )
    if Path(model_path).is_absolute():
        resolve_model(model_path)
    return token, None if heads is None else place_of(rollout.nodes_per_server, heads, node)


def place_of(count: int, heads: str, node: int | None = None) -> Place:
    """Return this node's place among the `count` nodes of its server.

    `heads` holds HOST:PORT of the first node of each server, separated by commas. `node` is the index of this node
    among the nodes of all servers; None reads it from Slurm's or Kubernetes' environment. Raises ValueError when they
    do not fit `rollout.nodes_per_server`.
    """
    firsts = heads.split(",")
    if count == 1:
        raise ValueError(
            f"--head: {heads} only applies to servers on several nodes; set rollout.nodes_per_server, or leave it out"
        )
    if node is None:
        node = next((int(ENVIRONMENT[key]) for key in NODE_INDICES if key in ENVIRONMENT), None)
    num_nodes = count * len(firsts)
    if node is None or not 0 <= node < num_nodes:
        raise ValueError(
            f"--node: {'missing' if node is None else node}, but there are {num_nodes} nodes, rollout.nodes_per_server "
            f"{count} for each address of --head; use 0 to {num_nodes - 1}"
        )
    host, colon, port = firsts[node // count].rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(f"--head: {firsts[node // count]} is not HOST:PORT; write it as 10.0.0.1:29600")
    return Place(node % count, host, int(port))


def node_name() -> str:
    """Return the name of this machine in files and lines."""
    return ENVIRONMENT.get("SLURMD_NODENAME", socket.gethostname())


@contextmanager
def reported_errors(urls: Path | None) -> Iterator[None]:
    """Context manager: a start's error becomes ConfigError, and the text of file NODE.failed in the folder `urls`."""
    try:
        yield
    except (ValueError, OSError) as error:
        if urls is not None:
            with suppress(OSError):
                report_start(urls, "failed", f"{error}\n")
        raise ConfigError(str(error)) from error


def report_start(urls: Path, suffix: str, text: str) -> None:
    """Write the file NODE.`suffix` of this machine to the folder `urls`: complete or absent."""
    urls.mkdir(parents=True, exist_ok=True)
    write_atomically(urls / f"{node_name()}.{suffix}", text)
