"""Defines the placement of vLLM's servers and chooses the transport of weights to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.transport_table import TRANSPORTS
from megagrpo.loopback import LOOPBACK

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

Placement = Literal["auto", "colocated", "dedicated", "external"]
LAST_PORT = 65535


def address_fault(url: str) -> str:
    """Return why `url` is no valid server address, as a predicate for a message; empty for a valid one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # an invalid IPv6 address or port
        return f"is not a valid URL: {error}"
    if parts.scheme not in ("http", "https"):
        return "does not start with http:// or https://"
    if not parts.hostname or not url.isprintable() or " " in url:
        return "has no valid host name"
    return "has port 0" if port == 0 else ""


def weight_path(config: RunConfig, gpu: bool, one_host: bool) -> tuple[str, str]:
    """Return the transport of the weights, a row of TRANSPORTS or the user's own, and the reason for it. `gpu`:
    trainer and servers compute on GPUs; `one_host`: all ranks and the first node of every server share a host. Raises
    ValueError when the configured transport cannot reach the servers."""
    r = config.rollout
    configured, placed = r.weight_sync_transport, r.placed
    if not config.syncs_weights:
        return "shared_memory", "lora.sync adapter sends files" + ("" if one_host else ", to other hosts over HTTP")
    if configured not in ("auto", *TRANSPORTS):  # of the user's own
        return configured, "set by rollout.weight_sync_transport"
    one_host = one_host and r.nodes_per_server == 1
    if configured == "cuda_ipc" and not gpu:
        raise ValueError("rollout.weight_sync_transport: cuda_ipc needs GPUs, but this host has no GPU; set it to auto")
    if configured == "p2p" and gpu and placed == "colocated":
        raise ValueError(
            "rollout.weight_sync_transport: p2p uses NCCL, which refuses two processes on one GPU, but "
            "rollout.placement is colocated; set the transport to auto"
        )
    if placed == "colocated" and config.run.nodes > 1 and not one_host:
        if configured == "p2p":
            return "p2p", "set by rollout.weight_sync_transport"
        transport = "cuda_ipc" if gpu and configured != "shared_memory" else "shared_memory"
        return transport, "each node's servers get weights from its ranks"
    if configured == "shared_memory" and not one_host:
        reason = "rollout.weight_sync_transport: shared_memory needs all ranks and servers on one host"
        raise ValueError(f"{reason}; set it to auto or p2p")
    if configured != "auto":
        return configured, "set by rollout.weight_sync_transport"
    if not gpu:
        return ("shared_memory", "single host") if one_host else ("p2p", "several hosts")
    if placed == "colocated" and one_host:
        return "cuda_ipc", "the servers share the trainer's GPUs"
    return "p2p", f"rollout.placement is {placed}" + ("" if one_host else ", several hosts")


def placement_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield placements and transports that contradict each other."""
    r, placement, urls = config.rollout, "rollout.placement", "rollout.urls"
    if r.placement == "external" and not r.urls:
        reason = "external needs the addresses of running servers, but rollout.urls is empty"
        yield Problem((placement, urls), f"{reason}; list them there, or choose auto")
    if r.placement in ("colocated", "dedicated") and r.urls:
        reason = f"{r.placement} servers are started by the run, but rollout.urls lists external ones"
        yield Problem((placement, urls), f"{reason}; leave rollout.urls empty, or choose external")
    if config.train.offload and r.placed == "dedicated":
        reason = "true frees GPU memory for colocated servers, but rollout.placement is dedicated; leave it empty"
        yield Problem(("train.offload", placement), reason)
    if r.placed == "colocated" and r.servers % config.run.nodes:
        reason = f"{r.servers} servers cannot be spread over run.nodes {config.run.nodes} nodes evenly; use a multiple"
        yield Problem(("rollout.servers", "run.nodes", placement), reason)
    yield from _transport_problems(config)
    if r.urls_file is not None and not r.urls:
        reason = "needs initial servers, but rollout.urls is empty"
        said = f"{reason}; list the initial servers there, or leave urls_file empty"
        yield Problem(("rollout.urls_file", urls), said)
    if r.interface != LOOPBACK and r.urls:
        reason = f"{r.interface} only applies to servers that the run starts, but rollout.urls lists external ones"
        yield Problem(("rollout.interface", urls), f"{reason}; leave it out")
    if not r.urls and r.port and (last := r.port + r.servers - 1) > LAST_PORT:
        reason = f"{r.port} with rollout.servers {r.servers} needs ports up to {last}, above the limit {LAST_PORT}"
        yield Problem(("rollout.port", "rollout.servers"), f"{reason}; lower it, or set it to 0")
    yield from [
        Problem((f"rollout.urls.{i}",), f"{url} {why}; write it as http://HOST:PORT")
        for i, url in enumerate(r.urls)
        if "@" not in url and (why := address_fault(url))
    ]
    yield from server_nodes_problems(config)
    if any("@" in url for url in r.urls):
        reason = "an address must not contain a password, which logs and resolved.yaml would show"
        yield Problem((urls,), f"{reason}; set rollout.token_file instead")


def _transport_problems(config: RunConfig) -> Iterator[Problem]:
    r, placement, urls = config.rollout, "rollout.placement", "rollout.urls"
    if r.weight_sync_transport == "cuda_ipc" and r.placed != "colocated":
        reason = f"cuda_ipc only reaches servers on the trainer's GPUs, but rollout.placement is {r.placed}"
        yield Problem(("rollout.weight_sync_transport", placement, urls), f"{reason}; choose p2p or auto")
    if r.weight_sync_relay and r.weight_sync_transport in ("shared_memory", "cuda_ipc"):
        reason = f"true only applies to p2p, but the transport is {r.weight_sync_transport}"
        yield Problem(("rollout.weight_sync_relay", "rollout.weight_sync_transport"), f"{reason}; leave it out")
    if r.weight_sync_transport not in ("auto", "shared_memory") and not config.syncs_weights:
        reason = f"{r.weight_sync_transport} sends weights, but lora.sync adapter sends adapters as files"
        fix = "set the transport to auto, or lora.sync to merged"
        yield Problem(("rollout.weight_sync_transport", "lora.sync", "lora.rank"), f"{reason}; {fix}")


def server_nodes_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what contradicts servers on several nodes each."""
    r, key, placement = config.rollout, "rollout.nodes_per_server", "rollout.placement"
    nodes, size = r.nodes_per_server, r.devices_per_server
    if nodes == 1:
        return
    if size % nodes:
        reason = f"{nodes} nodes cannot share {size} devices ({r.server_text}) evenly"
        yield Problem((key, "rollout.tp", "rollout.pp", "rollout.dp"), f"{reason}; use {nearest_divisor(size, nodes)}")
    elif nodes % r.dp and r.dp % nodes:
        reason = f"nodes and rollout.dp {r.dp} copies: neither divides the other, so nodes would hold parts of copies"
        yield Problem((key, "rollout.dp"), f"{nodes} {reason}; change one")
    if r.placed == "colocated":
        reason = f"{nodes} nodes per server need servers on nodes without ranks, but {placement} is colocated"
        yield Problem((key, placement), f"{reason}; choose dedicated or external, or set nodes_per_server to 1")
    elif r.placed == "dedicated" and r.servers * nodes > config.run.nodes:
        reason = (
            f"{nodes} nodes x rollout.servers {r.servers} need {r.servers * nodes} nodes, but run.nodes is "
            f"{config.run.nodes}; raise it"
        )
        yield Problem((key, "rollout.servers", "run.nodes"), reason)
    if r.weight_sync_transport == "shared_memory":
        reason = f"shared_memory reaches one host, but nodes_per_server is {nodes}; set the transport to auto or p2p"
        yield Problem(("rollout.weight_sync_transport", key), reason)


def nearest_divisor(of: int, near: int) -> int:
    """Return the divisor of `of` that is nearest to `near`; of two equally near ones the smaller."""
    near = min(near, of)
    return next(n for distance in range(near) for n in (near - distance, near + distance) if of % n == 0)
