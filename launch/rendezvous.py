"""The rendezvous of the launchers: where torchrun's agents, and then the ranks, find each other. Nothing here reads a pickle.

On one node no socket listens. The only agent keeps its notes in its own memory, and the ranks meet in a file of a folder that only
their user opens. On several nodes the first node's agent serves torch's TCPStore on the master address and on no other.
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

from launch.local import ONE_NODE, Nodes
from launch.preflight import listen
from megagrpo.process.variables import RENDEZVOUS_VARIABLE

BACKEND = "megagrpo"  # the name under which torchrun knows this rendezvous
SECONDS = 600  # until every agent must be there


class Rendezvous(RendezvousHandler):
    """A rendezvous in which the number of nodes and each node's rank are known before it starts."""

    def __init__(self, rank: int, num_nodes: int, address: str, port: int, run_id: str):
        self._rank, self._num_nodes, self._address, self._port, self._run_id = rank, num_nodes, address, port, run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks join the agent's store; on one node they meet in a file."""
        return self._num_nodes > 1

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """The agents' store. RuntimeError or OSError when the first node cannot be reached, or its address is not on that node."""
        store = self._served() if self._num_nodes > 1 else HashStore()
        address = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(PrefixStore(self._run_id, store), self._rank, self._num_nodes, address)

    def _served(self) -> Store:
        serves, timeout = self._rank == 0, timedelta(seconds=SECONDS)
        listener = listen(f"{self._address}:{self._port}").detach() if serves else None  # by itself torch listens on every address
        return TCPStore(self._address, self._port, self._num_nodes, serves, timeout, master_listen_fd=listener)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def options(nodes: Nodes = ONE_NODE) -> list[str]:
    """Options of torchrun for one node of a job.

    On one node also makes the folder in which its ranks meet: below the temporary folder, open to this user alone, with a secret by
    which ranks know each other's messages.
    """
    os.environ.pop(RENDEZVOUS_VARIABLE, None)
    if nodes.num_nodes == 1:
        folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        (folder / "secret").write_text(secrets.token_hex(32))
        os.environ[RENDEZVOUS_VARIABLE] = str(folder)
    endpoint = f"--rdzv-endpoint={nodes.address}:{nodes.port}"
    return [f"--rdzv-backend={BACKEND}", "--rdzv-id=ranks", f"--nnodes={nodes.num_nodes}", endpoint, f"--rdzv-conf=rank={nodes.rank}"]


def _made(parameters: RendezvousParameters) -> Rendezvous:
    address, _, port = parameters.endpoint.rpartition(":")
    return Rendezvous(int(parameters.get("rank")), parameters.max_nodes, address, int(port), parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _made)
