"""Chains of servers in a `p2p` weight sync: each server passes what it receives on to the next, like a broadcast.

Without chains the ranks send one copy of the model per server, so they bound the sync as soon as the servers have more
workers than the trainer has ranks. In a chain the ranks send to the first server only. Every worker receives one copy
and passes on one, and a network card does both at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

NO_FEEDER = -1


def feeders(boxes: Sequence[str], servers: Sequence[int], num_ranks: int) -> list[int]:
    """Return, for each worker, the worker that feeds it, or NO_FEEDER for a worker that the ranks send to.

    `boxes` holds the key of each worker's boxes, `servers` the number of workers of each server, in order. Only servers
    whose workers want the same boxes form chains, as many chains as `num_ranks` ranks can feed as fast as a worker
    receives. Chains of the same layout differ in length by at most one.
    """
    firsts = list(itertools.accumulate(servers, initial=0))[:-1]
    alike: dict[tuple[str, ...], list[int]] = {}  # the boxes of a server's workers -> the first worker of each server
    for first, count in zip(firsts, servers, strict=True):
        alike.setdefault(tuple(boxes[first : first + count]), []).append(first)
    feeder = [NO_FEEDER] * len(boxes)
    for keys, members in alike.items():
        chains = min(len(members), max(1, len(members) * num_ranks // len(boxes)))
        for position, first in enumerate(members[chains:]):  # server i + chains is fed by server i
            for worker in range(len(keys)):
                feeder[first + worker] = members[position] + worker
    return feeder


def heads(feeder: Sequence[int]) -> list[int]:
    """Return, for each worker, the first worker of its chain: itself when the ranks send to it."""
    head = list(range(len(feeder)))
    for worker, source in enumerate(feeder):
        if source != NO_FEEDER:  # a feeder has a smaller number
            head[worker] = head[source]
    return head
