"""Implements the launchers' rendezvous, through which torchrun's agents and then the ranks connect. Nothing here reads
a pickle.

On one node no socket listens: the agent keeps its store in memory, and the ranks use a FileStore in a folder that only
their user can open. On several nodes the first node's agent serves torch's TCPStore on the master address only.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from megagrpo.platform.launch.job_nodes import ONE_NODE, Nodes
from megagrpo.platform.launch.preflight import listen
from megagrpo.platform.process.variables import RENDEZVOUS_VARIABLE

RENDEZVOUS_BACKEND = "megagrpo"  # name of this rendezvous in torchrun
JOIN_SECONDS = 600  # timeout until every agent has joined


class Rendezvous(RendezvousHandler):
    """A static rendezvous: the number of nodes and each node's rank are known in advance."""

    def __init__(self, rank: int, num_nodes: int, address: str, port: int, run_id: str):
        self._rank, self._num_nodes, self._address, self._port, self._run_id = rank, num_nodes, address, port, run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the agent's store; on one node they use a FileStore."""
        return self._num_nodes > 1

    def get_backend(self) -> str:
        return RENDEZVOUS_BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the agents' store. Raises RuntimeError or OSError when the first node cannot be reached, or does not
        own its address."""
        store = self._tcp_store() if self._num_nodes > 1 else HashStore()
        address = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(PrefixStore(self._run_id, store), self._rank, self._num_nodes, address)

    def _tcp_store(self) -> Store:
        serves, timeout = self._rank == 0, timedelta(seconds=JOIN_SECONDS)
        # without it torch listens on every address
        listener = listen(f"{self._address}:{self._port}").detach() if serves else None
        return TCPStore(self._address, self._port, self._num_nodes, serves, timeout, master_listen_fd=listener)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def options(nodes: Nodes = ONE_NODE) -> list[str]:
    """Return torchrun's options for one node of a job.

    On one node it also creates the folder of the ranks' FileStore, in the temporary folder and accessible only to this
    user. It holds a secret with which ranks authenticate messages.
    """
    os.environ.pop(RENDEZVOUS_VARIABLE, None)
    if nodes.num_nodes == 1:
        folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        (folder / "secret").write_text(secrets.token_hex(32))
        os.environ[RENDEZVOUS_VARIABLE] = str(folder)
    endpoint = f"--rdzv-endpoint={nodes.address}:{nodes.port}"
    return [
        f"--rdzv-backend={RENDEZVOUS_BACKEND}",
        "--rdzv-id=ranks",
        f"--nnodes={nodes.num_nodes}",
        endpoint,
        f"--rdzv-conf=rank={nodes.rank}",
    ]


def _create(parameters: RendezvousParameters) -> Rendezvous:
    address, _, port = parameters.endpoint.rpartition(":")
    return Rendezvous(int(parameters.get("rank")), parameters.max_nodes, address, int(port), parameters.run_id)


rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _create)
