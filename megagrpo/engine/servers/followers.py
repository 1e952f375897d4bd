"""Servers on several nodes: the first node runs the HTTP server and leads, the other nodes follow.

Every node runs `megagrpo serve`, which starts its node's part of the server. vLLM's parts do not notice when one of
them dies: the others wait forever. So the first node serves a store. There it leaves an order for each start, and the
others report the state of their parts.
A server ends as soon as one of its parts has ended, and all parts start again together.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import asdict, dataclass
from typing import Any, Self

from megagrpo.engine.http.server_calls import Silence
from megagrpo.engine.servers.options import NodePorts
from megagrpo.platform.rendezvous.store_exchange import Deadline, Store
from megagrpo.types import WeightSyncError

FOLLOW_SECONDS = 0.5  # between two reports of a follower
LOST_SECONDS = 60.0  # without a report, after which a node counts as lost
ORDER = "order"
STORE_NAME = "the store of the server's first node"


def _report_key(node: int) -> str:
    return f"node/{node}"


@dataclass(frozen=True)
class PartFault:
    """Why a server cannot go on without one of its parts: a description, and the first exception in the part's log, if
    any. `killed`: by the out-of-memory killer or a user."""

    text: str
    cause: str = ""
    killed: bool = False


class Followers:
    """The other nodes of a server, seen from its first node. `num_nodes` counts the first node too.

    The store listens on `host` and `port` and signs values with `token`. Raises WeightSyncError if the port is taken.
    """

    def __init__(self, host: str, port: int, token: str, num_nodes: int):
        self._store = Store(host, port, Deadline(LOST_SECONDS), token, serve=True, name=STORE_NAME)
        self._nodes = range(1, num_nodes)
        self._attempt = 0
        self._silence, self._beats = Silence(), dict[int, int]()
        self.lost = ""  # description of the first node that is lost

    @property
    def port(self) -> int:
        """The store's port."""
        return self._store.port

    def start(self, ports: NodePorts) -> None:
        """Have every follower end its part, if any, and start a new one."""
        self._attempt += 1
        self._store.put(ORDER, {"attempt": self._attempt, **asdict(ports)})

    def missing(self) -> list[int]:
        """Return the nodes that have never reported."""
        return [node for node in self._nodes if not self._store.has(_report_key(node))]

    def fault(self) -> PartFault | None:
        """Return why the server cannot go on, or None while all parts run. A node without any report may be late."""
        for node in self._nodes:
            report = self._store.find(_report_key(node))
            if report is not None and (fault := self._judge(node, report)):
                return fault
        return None

    def _judge(self, node: int, report: dict[str, Any]) -> PartFault | None:
        name = f"node {node} ({report['host']})"
        if report["beat"] != self._beats.get(node):
            self._beats[node] = report["beat"]
            self._silence.heard(node)
        silent = self._silence.goes_on(node) > LOST_SECONDS
        if silent or report["left"]:
            self.lost = (
                f"{name} has not reported for {LOST_SECONDS:g} s" if silent else f"megagrpo serve on {name} has ended"
            )
            return PartFault(f"was stopped because {self.lost}")
        if report["attempt"] == self._attempt and report["exit"]:
            text = f"was stopped because its part on {name} {report['exit']} (log there: {report['log']})"
            return PartFault(text, report["cause"], report["killed"])
        return None


class Reports:
    """A follower's end: the orders of the first node, and the reports of this node, called `name`. A context manager
    that tells the first node at its end.

    The store at `host` and `port` is awaited up to `seconds`, or until `stop`. Raises WeightSyncError if unreachable.
    """

    def __init__(self, host: str, port: int, token: str, node: int, name: str, seconds: float, stop: threading.Event):
        deadline = Deadline(seconds)
        while not (stop.is_set() or deadline.passed or _listens(host, port)):
            stop.wait(FOLLOW_SECONDS)
        self._store = Store(
            host, port, Deadline(FOLLOW_SECONDS if stop.is_set() else LOST_SECONDS), token, name=STORE_NAME
        )
        self._node, self._name, self._beat, self._attempt = node, name, 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.put(left=True)
        except WeightSyncError:
            pass  # the first node is gone too

    def order(self) -> NodePorts | None:
        """Return a new start's ports; None if no order is new. Raises WeightSyncError if the first node is gone."""
        order = self._store.find(ORDER)
        if order is None or order["attempt"] == self._attempt:
            return None
        self._attempt = order.pop("attempt")
        return NodePorts(**order)

    def put(self, *, exit: str = "", cause: str = "", killed: bool = False, log: str = "", left: bool = False) -> None:
        """Report this node's part; `exit` is how it ended. Raises WeightSyncError when the first node is gone."""
        self._beat += 1
        state = {"attempt": self._attempt, "beat": self._beat, "host": self._name, "left": left}
        self._store.put(_report_key(self._node), state | {"exit": exit, "cause": cause, "killed": killed, "log": log})


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=FOLLOW_SECONDS).close()
    except OSError:
        return False
    return True
