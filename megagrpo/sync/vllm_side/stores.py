"""Rendezvous stores of vLLM's processes: a patch that makes a store listen on its own address only."""

from __future__ import annotations

import functools
import importlib
import socket
from typing import Any

MODULES = ("torch.distributed.rendezvous", "vllm.distributed.utils")
"""The modules that create process groups' stores: torch's for a group's address, vLLM's for data-parallel copies."""


def listen_on_own_address() -> None:
    """Make the stores of this process's groups listen on the address of their rendezvous.

    By itself torch's TCPStore listens on every address, has no password, and lets any host change what the processes of
    a server tell each other. torch closes the socket passed to it. A second store of this process at the same port
    shares the first one's server.
    """
    for name in MODULES:
        module: Any = importlib.import_module(name)
        if not hasattr(module.TCPStore, "__wrapped__"):
            module.TCPStore = _private(module.TCPStore)


def _private(store: Any) -> Any:
    """Return the class `store` with a constructor that passes a listening socket."""

    @functools.wraps(store, updated=())
    def construct(host_name: str, port: int, *arguments: Any, is_master: bool = False, **options: Any) -> Any:
        if is_master and options.get("master_listen_fd") is None:
            family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
            try:
                options["master_listen_fd"] = socket.create_server(
                    (host_name, port), family=family, backlog=4096
                ).detach()
            except OSError:  # this process has a store at this port, or torch reports the port that is taken
                pass
        return store(host_name, port, *arguments, is_master=is_master, **options)

    return construct
