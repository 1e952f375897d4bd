"""Servers on a run's other nodes (`rollout.placement: colocated`, `run.nodes` above 1), controlled from rank 0.

The first rank of each node launches the servers of its node. There a `NodeAgent` answers rank 0 through the store, a
key-value store: it publishes the state of its servers, and restarts or ends a server on demand. So one restart thread,
on rank 0, decides for all nodes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from megagrpo.engine.servers.launcher import Launcher, Server
from megagrpo.platform.rendezvous.store_exchange import Deadline, Store
from megagrpo.types import WeightSyncError

AGENT_SECONDS = 0.1  # between two polls of servers and orders
ORDER_SECONDS = 60.0  # timeout of an order: ending a server takes up to 15 s


class NodeAgent:
    """A thread on node `node`'s first rank that publishes `launcher`'s servers on `store` and executes rank 0's orders.

    A context manager; leave it before the launcher stops. The thread ends when the store is gone. Raises
    WeightSyncError when the store cannot be reached.
    """

    def __init__(self, node: int, launcher: Launcher, store: Store):
        self._node, self._launcher, self._store = node, launcher, store
        self._orders, self._published = 0, ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node_agent", daemon=True)
        self._publish()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=AGENT_SECONDS + 1)

    def _run(self) -> None:
        try:
            while not self._end.wait(AGENT_SECONDS):
                self._publish()
                order = self._store.find(f"order/{self._node}/{self._orders}")
                if order is not None:
                    answer = self._carry_out(order["verb"], order["index"])
                    self._publish()  # before the answer: rank 0 then reads the new state
                    self._store.put(f"answer/{self._node}/{self._orders}", answer)
                    self._orders += 1
        except WeightSyncError:
            return  # rank 0 has ended

    def _carry_out(self, verb: str, index: int) -> str:
        try:
            if verb == "restart":
                return self._launcher.restart(index)
            self._launcher.servers[index].end()
        except Exception as error:  # the thread must survive; rank 0 shows the text
            return f"node {self._node}: {verb} of a vLLM server failed: {type(error).__name__}: {error}"
        return ""

    def _publish(self) -> None:
        state = [
            {"url": server.url, "address": server.address, "log": str(server.log), "process": server.process}
            | {"alive": server.alive, "exit_description": "" if server.alive else server.exit_description}
            | {"restarts": self._launcher.restarts[server.url]}
            for server in self._launcher.servers
        ]
        if repr(state) != self._published:
            self._store.put(f"state/{self._node}", state)
            self._published = repr(state)


@dataclass(frozen=True)
class DistantServer:
    """A server of another node as its agent last published it. Fields are as in `Server`; `process` names its node."""

    url: str
    address: str
    log: Path
    process: Hashable
    alive: bool
    exit_description: str
    restarts: int
    order: Callable[[str], str]  # has the agent carry out a verb on this server

    def end(self) -> None:
        """Stop the server and all its processes. Raises WeightSyncError when its node fails to, or does not respond
        within ORDER_SECONDS."""
        if failure := self.order("end"):
            raise WeightSyncError(failure)


type AnyServer = Server | DistantServer


class NodeLaunchers:
    """The servers of all nodes, on rank 0: its own `launcher`'s and, through `store`, `per_node` of each other node.

    Construct it after the agents of `nodes` have published their servers. Every method and property raises
    WeightSyncError when the store is gone.
    """

    def __init__(self, launcher: Launcher, store: Store, nodes: Sequence[int], per_node: int):
        self._own, self._store, self._orders = launcher, store, Counter[int]()
        self._locks = {node: threading.Lock() for node in nodes}
        self._distant = [(node, index) for node in nodes for index in range(per_node)]
        self.token, self.max_restarts = launcher.token, launcher.max_restarts
        self.startup_timeout = launcher.startup_timeout

    @property
    def servers(self) -> list[AnyServer]:
        """All servers, in order."""
        return [*self._own.servers, *map(self._published, self._distant)]

    @property
    def logs(self) -> list[Path]:
        """Log files of the servers, in order."""
        return [server.log for server in self.servers]

    @property
    def restarts(self) -> Counter[str]:
        """URL -> number of restarts."""
        distant = map(self._published, self._distant)
        return self._own.restarts + Counter({server.url: server.restarts for server in distant})

    def may_restart(self, url: str) -> bool:
        """Whether the server has been restarted fewer times than the limit."""
        return self.restarts[url] < self.max_restarts

    def restart(self, index: int) -> str:
        """Restart a server that has ended, without waiting for it, and return the line to log."""
        if index < len(self._own.servers):
            return self._own.restart(index)
        return self._order(self._distant[index - len(self._own.servers)], "restart")

    def _published(self, where: tuple[int, int]) -> DistantServer:
        """Return the server `where` (node, index there) as its agent published it last."""
        node, index = where
        state = self._store.find(f"state/{node}")[index]
        state |= {"log": Path(state["log"]), "process": (node, state["process"])}
        return DistantServer(**state, order=partial(self._order, where))

    def _order(self, where: tuple[int, int], verb: str) -> str:
        """Have the agent of the server `where` carry out a verb, and return its answer."""
        node, index = where
        with self._locks[node]:
            number = self._orders[node]
            self._orders[node] += 1
            self._store.put(f"order/{node}/{number}", {"verb": verb, "index": index})
            purpose, deadline = f"node {node} to {verb} a vLLM server", Deadline(ORDER_SECONDS)
            return str(self._store.wait_for(f"answer/{node}/{number}", purpose, deadline))


type AnyLauncher = Launcher | NodeLaunchers
