"""The number of requests that a server gets at once, from its slots and from the length of its waiting queue."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

# The name[] of the route with a slash selects metrics; the route without it computes all of the server's metrics.
QUEUE_ROUTE = "/metrics/?name[]=vllm:num_requests_running&name[]=vllm:num_requests_waiting"
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
RESERVE = 1 / 32  # sequences in a server's waiting queue, as a share of its slots


class Queue(NamedTuple):
    """The sequences of all clients that a server works on, and those that wait for a slot or for KV cache."""

    running: float
    waiting: float


def read_queue(text: str) -> Queue | None:
    """Return the queue from a server's metrics, summed over its engines; None if the server does not report it."""
    sums: dict[str, float] = defaultdict(float)
    for name, value in _GAUGE.findall(text):
        sums[name] += float(value)
    return Queue(sums["running"], sums["waiting"]) if len(sums) == 2 else None


class Slots:
    """How many sequences each server may have of this client, whose name for a server is its URL.

    A server decodes up to `max_num_seqs` sequences of all `clients` at once. Each client begins with an equal share.
    `observe` adapts the share, so that a server's waiting queue stays just above empty: a longer queue means that the
    server has no room (other clients use it, or its KV cache is full), an empty one that it has. A sequence in the
    waiting queue takes the slot of one that ends at once, without the time of a request; RESERVE of them are enough.
    """

    def __init__(self, max_num_seqs: int, clients: int = 1):
        self._reserve = int(max_num_seqs * RESERVE)
        # of all clients, on one server
        self.most, share = max_num_seqs + self._reserve, math.ceil(max_num_seqs / clients)
        self._own_reserve = int(share * RESERVE)
        self._limits: dict[str, int] = defaultdict(lambda: share + self._own_reserve)

    def slots(self, url: str) -> int:
        """Sequences that the server works on at once for this client."""
        return max(1, self._limits[url] - self._own_reserve)

    def limit(self, url: str) -> int:
        """Sequences that the server may have of this client, those in its waiting queue included."""
        return self._limits[url]

    def observe(self, url: str, queue: Queue, mine: int) -> None:
        """Adapt the server's limit to its queue; `mine` of its sequences are this client's."""
        excess, limit = queue.waiting - self._reserve, self._limits[url]
        if excess > 0:  # each client gives up its part of the excess
            part = mine / max(mine, queue.running + queue.waiting)
            limit = mine - math.ceil(excess * part)
        elif queue.waiting == 0:
            limit = max(limit, mine + max(1, mine // 2))
        self._limits[url] = max(1, min(self.most, limit))
