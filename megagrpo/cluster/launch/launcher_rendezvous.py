"""Implements the launchers' rendezvous, which connects torchrun's agents, then the ranks. Nothing here reads a pickle.

On one node no socket listens: the agent keeps its store in memory, and the ranks use a FileStore in a folder that only
their user can open. On several nodes the first node's agent serves torch's TCPStore on the master address only.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from megagrpo.cluster.launch.preflight import listen
from megagrpo.loopback import LOOPBACK_ADDRESS
from megagrpo.platform.process.open_files import raise_open_files
from megagrpo.platform.process.variables import ENVIRONMENT, RENDEZVOUS_VARIABLE

RENDEZVOUS_BACKEND = "megagrpo"  # name of this rendezvous in torchrun
JOIN_SECONDS = 600  # timeout until every agent has joined
LEFT, LEAVE_SECONDS = "megagrpo/agents_left", 10.0  # the key of their number, and how long the first node waits for all


class Nodes(NamedTuple):
    """The nodes of a job: `rank` is this node's index; `address` and `port` are the first node's. One node needs
    neither."""

    rank: int = 0
    num_nodes: int = 1
    address: str = LOOPBACK_ADDRESS
    port: int = 0


class Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, in which each node's rank is known in advance, with a store of this module."""

    def get_backend(self) -> str:
        return RENDEZVOUS_BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the agent's store; on one node they use a FileStore."""
        return self.world_size > 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the agents' store. Raises RuntimeError or OSError when the first node cannot be reached, or does not
        own its address."""
        self._store = self._tcp_store() if self.world_size > 1 else HashStore()
        return super().next_rendezvous()

    def shutdown(self) -> bool:
        """Let the agent that serves the store end last: until then the others may wait for its answers.

        Without it an agent of another node prints a traceback of a lost connection at the end of a job.
        """
        store, deadline = self._store, time.monotonic() + LEAVE_SECONDS
        if self.world_size > 1 and store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone: its node has failed
                left = store.add(LEFT, 1)
                while self.rank == 0 and left < self.world_size and time.monotonic() < deadline:
                    time.sleep(0.02)
                    left = store.add(LEFT, 0)
        return True

    def _tcp_store(self) -> Store:
        address, port, serves = self.master_addr, self.master_port, self.rank == 0
        if serves:
            raise_open_files()  # a connection for each rank and each agent
        listener = listen(f"{address}:{port}").detach() if serves else None  # otherwise torch listens on every address
        return TCPStore(address, port, self.world_size, serves, self.timeout, master_listen_fd=listener)


def options(nodes: Nodes) -> list[str]:
    """Return torchrun's options for one node of a job.

    On one node it also creates the folder of the ranks' FileStore, in the temporary folder and accessible only to this
    user. It holds a secret with which ranks authenticate messages.
    """
    ENVIRONMENT.pop(RENDEZVOUS_VARIABLE, None)
    if nodes.num_nodes == 1:
        folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        (folder / "secret").write_text(secrets.token_hex(32))
        ENVIRONMENT[RENDEZVOUS_VARIABLE] = str(folder)
    options = [f"--rdzv-backend={RENDEZVOUS_BACKEND}", f"--rdzv-endpoint={nodes.address}:{nodes.port}"]
    return [*options, "--rdzv-id=ranks", f"--rdzv-conf=rank={nodes.rank}", f"--nnodes={nodes.num_nodes}"]


def _create(parameters: RendezvousParameters) -> Rendezvous:
    address, _, port = parameters.endpoint.rpartition(":")
    rank = int(parameters.get("rank"))
    return Rendezvous(address, int(port), rank, parameters.max_nodes, parameters.run_id, JOIN_SECONDS)


rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _create)
