"""Servers on the other nodes of a run (`rollout.placement: colocated` with `run.nodes` above 1), seen and controlled
from rank 0.

The first rank of each node launches the servers of its node. There a `NodeAgent` answers rank 0 through the board, a
key-value store: it publishes the state of its servers, and restarts or ends a server on demand. So one restart thread,
on rank 0, decides for all nodes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megagrpo.engine.servers.launched import LaunchedServer
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.sync.wire.exchange import Board, Deadline
from megagrpo.sync.wire.manifest import WeightSyncError

AGENT_SECONDS = 0.1  # between two polls of servers and orders
ORDER_SECONDS = 60.0  # timeout of an order: ending a server takes up to 15 s


class NodeAgent:
    """A thread on the first rank of node `node`: it publishes the state of `launcher`'s servers on `board` and carries
    out rank 0's orders.

    A context manager; leave it before the launcher stops. The thread ends when the board is gone. Raises
    WeightSyncError when the board cannot be reached.
    """

    def __init__(self, node: int, launcher: Launcher, board: Board):
        self._node, self._launcher, self._board = node, launcher, board
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
                order = self._board.find(f"order/{self._node}/{self._orders}")
                if order is not None:
                    answer = self._carry_out(order["verb"], order["index"])
                    self._publish()  # before the answer: rank 0 then reads the new state
                    self._board.put(f"answer/{self._node}/{self._orders}", answer)
                    self._orders += 1
        except WeightSyncError:
            return  # rank 0 has ended

    def _carry_out(self, verb: str, index: int) -> str:
        try:
            if verb == "restart":
                return self._launcher.restart(index)
            self._launcher.servers[index].end()
        except Exception as error:  # the thread must survive; rank 0 shows the text
            return f"{verb} of a vLLM server failed: {type(error).__name__}: {error}"
        return ""

    def _publish(self) -> None:
        state = [
            {"url": server.url, "address": server.address, "log": str(server.log), "process": server.supervisor.pid}
            | {"alive": server.alive, "exit": "" if server.alive else server.exit_description}
            | {"restarts": self._launcher.restarts[server.url]}
            for server in self._launcher.servers
        ]
        if repr(state) != self._published:
            self._board.put(f"state/{self._node}", state)
            self._published = repr(state)


@dataclass(frozen=True)
class DistantServer:
    """A server of another node, by its `index` there. Its properties read the state that the node's agent published
    last.

    Properties raise WeightSyncError when the board is gone; `end` also when the agent does not answer within
    ORDER_SECONDS.
    """

    node: int
    index: int
    board: Board
    order: Callable[[int, str, int], str]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.board.find(f"state/{self.node}")[self.index]
        return state

    @property
    def url(self) -> str:
        return str(self._state()["url"])

    @property
    def address(self) -> str:
        return str(self._state()["address"])

    @property
    def log(self) -> Path:
        return Path(self._state()["log"])

    @property
    def process(self) -> Hashable:
        return self.node, self._state()["process"]

    @property
    def alive(self) -> bool:
        return bool(self._state()["alive"])

    @property
    def exit_description(self) -> str:
        return str(self._state()["exit"])

    @property
    def restarts(self) -> int:
        """Number of restarts so far."""
        return int(self._state()["restarts"])

    def end(self) -> None:
        """Stop the server and all its processes. Raises WeightSyncError when its node fails to, or does not respond."""
        if failure := self.order(self.node, "end", self.index):
            raise WeightSyncError(f"node {self.node}: {failure}")


class NodeLaunchers:
    """The servers of all nodes, on rank 0: its own `launcher`'s, and those of the other nodes, `per_node` each, through
    `board`.

    Construct it after the agents of `nodes` have published their servers. Raises WeightSyncError like `DistantServer`.
    """

    def __init__(self, launcher: Launcher, board: Board, nodes: Sequence[int], per_node: int):
        self._own, self._board, self._orders = launcher, board, Counter[int]()
        self._locks = {node: threading.Lock() for node in nodes}
        self._distant = [DistantServer(node, index, board, self._order) for node in nodes for index in range(per_node)]
        self.token, self.startup_timeout, self.max_restarts = (
            launcher.token,
            launcher.startup_timeout,
            launcher.max_restarts,
        )

    @property
    def servers(self) -> list[LaunchedServer]:
        """All servers, in order."""
        return [*self._own.servers, *self._distant]

    @property
    def urls(self) -> list[str]:
        """URLs of the servers, in order."""
        return [server.url for server in self.servers]

    @property
    def logs(self) -> list[Path]:
        """Log files of the servers, in order."""
        return [server.log for server in self.servers]

    @property
    def restarts(self) -> Counter[str]:
        """URL -> number of restarts."""
        return self._own.restarts + Counter({server.url: server.restarts for server in self._distant})

    def may_restart(self, server: LaunchedServer) -> bool:
        """Whether the server has been restarted fewer times than the limit."""
        return self.restarts[server.url] < self.max_restarts

    def restart(self, index: int) -> str:
        """Restart a server that has ended, without waiting for it, and return the line to log."""
        if index < len(self._own.servers):
            return self._own.restart(index)
        distant = self._distant[index - len(self._own.servers)]
        return self._order(distant.node, "restart", distant.index)

    def _order(self, node: int, verb: str, index: int) -> str:
        """Have an agent carry out an order, and return its answer."""
        with self._locks[node]:
            number = self._orders[node]
            self._orders[node] += 1
            self._board.put(f"order/{node}/{number}", {"verb": verb, "index": index})
            return str(
                self._board.take(
                    f"answer/{node}/{number}", f"node {node} to {verb} a vLLM server", Deadline(ORDER_SECONDS)
                )
            )
