"""Where vLLM's servers run, and which way the weights take to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from megagrpo.config.problems import Problem

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

Placement = Literal["auto", "colocated", "dedicated", "external"]
LAST_PORT = 65535
LOOPBACK = "lo"  # the interface that only this host reaches
Transport = Literal["auto", "shared_memory", "p2p", "cuda_ipc"]


def address_fault(url: str) -> str:
    """Why `url` cannot be the address of a server, as the end of a sentence; empty when it can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # brackets around what is no IPv6 address, or a port that is none
        return f"is no address: {error}"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if not parts.hostname or not url.isprintable() or " " in url:
        return "names no host"
    return "has port 0" if port == 0 else ""


def weight_path(config: RunConfig, gpu: bool, one_host: bool) -> tuple[str, str]:
    """The transport of the weights (shared_memory, p2p or cuda_ipc), and why it is that. `gpu`: trainer and servers compute on GPUs;
    `one_host`: all ranks and servers share a host. ValueError when the transport that the config names does not reach the servers."""
    r = config.rollout
    asked, placed = r.weight_sync_transport, r.placed
    if config.lora.syncs_adapters:
        if not one_host:
            raise ValueError("lora.sync: adapters travel as files, so all ranks and servers must be on one host; set it to merged")
        return "shared_memory", "lora.sync is adapter: adapters travel as files"
    if asked == "cuda_ipc" and not gpu:
        raise ValueError("rollout.weight_sync_transport: cuda_ipc needs GPUs, and there are none here; set it to auto")
    if asked == "shared_memory" and not one_host:
        raise ValueError("rollout.weight_sync_transport: shared_memory needs all ranks and servers on one host; set it to auto or p2p")
    if asked != "auto":
        return asked, "set by rollout.weight_sync_transport"
    if not gpu:
        return ("shared_memory", "single host") if one_host else ("p2p", "several hosts")
    if placed == "colocated" and one_host:
        return "cuda_ipc", "the servers share the trainer's GPUs"
    return "p2p", f"rollout.placement is {placed}" + ("" if one_host else ", several hosts")


def placement_problems(config: RunConfig) -> list[Problem]:
    """Placements and transports that contradict each other."""
    r, problems, placement, urls = config.rollout, [], "rollout.placement", "rollout.urls"
    if r.placement == "external" and not r.urls:
        said = "external servers are those of rollout.urls, which is empty; name them, or choose auto"
        problems.append(Problem((placement, urls), said))
    if r.placement in ("colocated", "dedicated") and r.urls:
        said = f"{r.placement} servers are started here, and rollout.urls names others; leave rollout.urls empty, or choose external"
        problems.append(Problem((placement, urls), said))
    if config.train.offload and r.placed == "dedicated":
        said = "true makes room for servers on the same GPUs, and dedicated ones have their own; leave it empty"
        problems.append(Problem(("train.offload", placement), said))
    if config.run.nodes > 1 and r.placed == "colocated":
        said = f"{r.placed} servers share the GPUs of one node, and run.nodes is {config.run.nodes}; choose dedicated, or external with "
        problems.append(Problem((placement, "run.nodes", urls), f"{said}rollout.urls"))
    if r.weight_sync_transport == "cuda_ipc" and r.placed != "colocated":
        said = f"cuda_ipc reaches only servers on the trainer's own GPUs, and rollout.placement is {r.placed}; choose p2p or auto"
        problems.append(Problem(("rollout.weight_sync_transport", placement, urls), said))
    if r.weight_sync_transport in ("p2p", "cuda_ipc") and config.lora.syncs_adapters:
        said = f"{r.weight_sync_transport} moves weights, and lora.sync adapter sends adapters as files; set it to auto, or lora.sync to "
        problems.append(Problem(("rollout.weight_sync_transport", "lora.sync", "lora.rank"), f"{said}merged"))
    if r.urls_file is not None and not r.urls:
        said = "it changes the servers of rollout.urls, which is empty; name those to begin with"
        problems.append(Problem(("rollout.urls_file", urls), said))
    if r.interface != LOOPBACK and r.urls:
        said = f"{r.interface} is for servers started here, and rollout.urls names others; leave it out"
        problems.append(Problem(("rollout.interface", urls), said))
    if not r.urls and r.port and (last := r.port + r.servers - 1) > LAST_PORT:
        said = f"{r.port}, and rollout.servers {r.servers} need ports up to {last}; the last one is {LAST_PORT}, lower it or set it to 0"
        problems.append(Problem(("rollout.port", "rollout.servers"), said))
    problems += [
        Problem((f"rollout.urls.{i}",), f"{url} {why}; write it as http://HOST:PORT")
        for i, url in enumerate(r.urls)
        if "@" not in url and (why := address_fault(url))
    ]
    if any("@" in url for url in r.urls):
        problems.append(Problem((urls,), "an address must not hold a password, everybody reads it; name its file in rollout.token_file"))
    return problems
