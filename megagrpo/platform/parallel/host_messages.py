"""Small tensors between ranks over gloo, in as many rounds as the number of ranks has binary digits.

gloo's own all-reduce and all-gather are rings: a message of one number takes 2 (N - 1) hops, 1.6 s at 16,384 ranks and
50 us a hop. Recursive doubling takes 14 rounds, and recursive halving then doubling, for long vectors, 28 rounds with
twice the vector's bytes (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in
MPICH", section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

# by name, or the merge of two tensors of equal shape, those of lower ranks first; it must be associative
Reduction = Literal["sum", "max", "min"] | Callable[[Tensor, Tensor], Tensor]

LONG_BYTES = 2**16  # from here on the bytes of a message, not its rounds, take the time

_MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def all_reduce(values: Tensor, reduction: Reduction, group: dist.ProcessGroup) -> Tensor:
    """Return `values`, on the host, reduced over the ranks of `group`: the same bits on every rank. Collective.

    In round k a rank exchanges what it has with the rank whose index differs in bit k, and both merge the two in rank
    order. So all ranks compute the same tree. Beyond the largest power of two, neighbors merge first and share a rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = 1 << (size.bit_length() - 1)
    shared, total = 2 * (size - whole), values.contiguous()  # the first `shared` ranks go in pairs
    named = isinstance(reduction, str)
    merge = _MERGES[reduction] if isinstance(reduction, str) else reduction
    if rank < shared:
        if rank % 2 == 0:
            dist.send(total, group=group, group_dst=rank + 1)
            return _received(total, rank + 1, group)
        total = merge(_received(total, rank - 1, group), total)
    index = rank // 2 if rank < shared else rank - shared // 2
    peers = [index ^ (1 << bit) for bit in range(whole.bit_length() - 1)]
    peers = [2 * peer + 1 if peer < shared // 2 else peer + shared // 2 for peer in peers]
    reduced = _halving if named and total.nbytes > LONG_BYTES else _doubling
    total = reduced(total, merge, rank, peers, group)
    if rank < shared:
        dist.send(total, group=group, group_dst=rank - 1)
    return total


def _doubling(
    total: Tensor, merge: Callable[[Tensor, Tensor], Tensor], rank: int, peers: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange everything with each peer."""
    for peer in peers:
        theirs = _exchanged(total, total, peer, group)
        total = merge(total, theirs) if rank < peer else merge(theirs, total)
    return total


def _halving(
    total: Tensor, merge: Callable[[Tensor, Tensor], Tensor], rank: int, peers: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange halves of halves with each peer, so that a rank reduces its own part, then the reduced parts."""
    own, held = total.flatten().clone(), list[tuple[Tensor, Tensor]]()
    rest = own
    for peer in peers:
        lower, upper = rest.tensor_split(2)
        rest, given = (lower, upper) if rank < peer else (upper, lower)
        theirs = _exchanged(given, rest, peer, group)
        rest.copy_(merge(rest, theirs) if rank < peer else merge(theirs, rest))
        held.append((rest, given))
    for peer, (kept, given) in zip(reversed(peers), reversed(held), strict=True):
        given.copy_(_exchanged(kept, given, peer, group))
    return own.view(total.shape)


def _exchanged(mine: Tensor, like: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    """Send `mine` to rank `peer` of `group`, and return its tensor, of the shape and dtype of `like`."""
    sending = dist.isend(mine, group=group, group_dst=peer)
    received = _received(like, peer, group)
    if sending is not None:
        sending.wait()
    return received


def _received(like: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(like)
    dist.recv(received, group=group, group_src=peer)
    return received
