"""Small tensors between ranks over gloo, in as many rounds as the number of ranks has binary digits.

gloo's own all-reduce and all-gather are rings: a message of one number takes 2 (N - 1) hops, 1.6 s at 16,384 ranks and
50 us a hop. Recursive doubling takes 14 rounds, and recursive halving then doubling, for long vectors, 28 rounds with
twice the vector's bytes (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in
MPICH", section 3).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

# by name, or the merge of two tensors of equal shape, those of lower ranks first; it must be associative
Reduction = Literal["sum", "max", "min"] | Callable[[Tensor, Tensor], Tensor]

LONG_BYTES = 2**16  # from here on the bytes of a message, not its rounds, take the time
MARK_SECONDS = 60.0  # after a timeout, rank 0 waits at most this long for the marks of ranks that have joined

_MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True)
class _Messages:
    """Messages to and from ranks of `group`, which raise RuntimeError after `deadline`, a monotonic time, if any."""

    group: dist.ProcessGroup
    deadline: float | None

    def send(self, mine: Tensor, peer: int) -> None:
        self._wait(dist.isend(mine, group=self.group, group_dst=peer))

    def receive(self, like: Tensor, peer: int) -> Tensor:
        """Return the tensor of rank `peer`, of the shape and dtype of `like`."""
        received = torch.empty_like(like)
        self._wait(dist.irecv(received, group=self.group, group_src=peer))
        return received

    def exchange(self, mine: Tensor, like: Tensor, peer: int) -> Tensor:
        """Send `mine` to rank `peer`, and return its tensor."""
        sending = dist.isend(mine, group=self.group, group_dst=peer)
        received = self.receive(like, peer)
        self._wait(sending)
        return received

    def _wait(self, work: dist.Work | None) -> None:
        if work is None:
            return
        if self.deadline is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(self.deadline - time.monotonic(), 0.001)))  # 0 would be no timeout


def all_reduce(values: Tensor, reduction: Reduction, group: dist.ProcessGroup, within: float | None = None) -> Tensor:
    """Return `values`, on the host, reduced over the ranks of `group`: the same bits on every rank. Collective.

    In round k a rank exchanges what it has with the rank whose index differs in bit k, and both merge the two in rank
    order. So all ranks compute the same tree. Beyond the largest power of two, neighbors merge first and share a rank.

    Raises RuntimeError `within` seconds when a rank has not joined; gloo then closes the connections of this rank.
    Without `within` the group's own timeout applies.
    """
    messages = _Messages(group, None if within is None else time.monotonic() + within)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = 1 << (size.bit_length() - 1)
    shared, total = 2 * (size - whole), values.contiguous()  # the first `shared` ranks go in pairs
    named = isinstance(reduction, str)
    merge = _MERGES[reduction] if isinstance(reduction, str) else reduction
    if rank < shared:
        if rank % 2 == 0:
            messages.send(total, rank + 1)
            return messages.receive(total, rank + 1)
        total = merge(messages.receive(total, rank - 1), total)
    index = rank // 2 if rank < shared else rank - shared // 2
    peers = [index ^ (1 << bit) for bit in range(whole.bit_length() - 1)]
    peers = [2 * peer + 1 if peer < shared // 2 else peer + shared // 2 for peer in peers]
    reduced = _halving if named and total.nbytes > LONG_BYTES else _doubling
    total = reduced(total, merge, rank, peers, messages)
    if rank < shared:
        messages.send(total, rank - 1)
    return total


def late_ranks(rank: int, size: int, joined: float, within: float) -> list[int]:
    """Tell the world's store when this rank joined a message that failed, in seconds since 1970. On rank 0, return the
    ranks that joined more than `within` seconds after the first one, or not at all; on other ranks return none."""
    marks = [f"joined/{rank}" for rank in range(size)]
    times: dict[int, float] = {}
    with contextlib.suppress(RuntimeError):  # the store ends with its host
        store = _get_default_store()
        store.set(marks[rank], str(joined))
        if rank == 0:
            with contextlib.suppress(RuntimeError):  # a mark is missing
                store.wait(marks, timedelta(seconds=min(within, MARK_SECONDS)))
            times = {rank: float(store.get(mark)) for rank, mark in enumerate(marks) if store.check([mark])}
    first = min(times.values(), default=0.0)
    return [rank for rank in range(size) if times and times.get(rank, math.inf) > first + within]


def _doubling(
    total: Tensor, merge: Callable[[Tensor, Tensor], Tensor], rank: int, peers: list[int], messages: _Messages
) -> Tensor:
    """Exchange everything with each peer."""
    for peer in peers:
        theirs = messages.exchange(total, total, peer)
        total = merge(total, theirs) if rank < peer else merge(theirs, total)
    return total


def _halving(
    total: Tensor, merge: Callable[[Tensor, Tensor], Tensor], rank: int, peers: list[int], messages: _Messages
) -> Tensor:
    """Exchange halves of halves with each peer, so that a rank reduces its own part, then the reduced parts."""
    own, held = total.flatten().clone(), list[tuple[Tensor, Tensor]]()
    rest = own
    for peer in peers:
        lower, upper = rest.tensor_split(2)
        rest, given = (lower, upper) if rank < peer else (upper, lower)
        theirs = messages.exchange(given, rest, peer)
        rest.copy_(merge(rest, theirs) if rank < peer else merge(theirs, rest))
        held.append((rest, given))
    for peer, (kept, given) in zip(reversed(peers), reversed(held), strict=True):
        given.copy_(messages.exchange(kept, given, peer))
    return own.view(total.shape)
