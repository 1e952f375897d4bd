"""Which rank writes which block for the servers of its own node, and which blocks must first travel from another node.

With colocated servers on several nodes every node has its own files, and its ranks write the whole model to them. A
block that no rank of a node holds is received by one of its ranks from a rank that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megagrpo.families.shared.boxes import Box
from megagrpo.weights.slices.box_slices import owners
from megagrpo.weights.slices.sync_plan import layer_of
from megagrpo.weights.slices.tensor_index import TensorIndex

BlockKey = tuple[str, tuple[int, ...], Box]  # tensor, its full shape, and the part of it: equal for replicas of a block


class Nodes(NamedTuple):
    """The nodes of a run. One node needs no `servers`."""

    of_ranks: tuple[int, ...] = (0,)  # index of every rank's node
    servers: Mapping[str, int] = MappingProxyType({})  # url of a server -> index of its node

    @property
    def many(self) -> bool:
        """Whether the ranks are on several nodes."""
        return len(set(self.of_ranks)) > 1

    def servers_of(self, node: int) -> list[str]:
        """Return the servers on a node."""
        return [url for url, index in self.servers.items() if index == node]


class NodeFiles(NamedTuple):
    """The files of an update on another node, as rank 0 knows them."""

    tensors: TensorIndex
    folder: Path
    servers: list[str]


Sizes = Sequence[Sequence[tuple[BlockKey, int]]]  # per rank: its blocks, with their elements


@dataclass(frozen=True)
class Transfer:
    """One block that rank `sender` sends to rank `receiver` of another node."""

    key: BlockKey
    sender: int
    receiver: int


@dataclass(frozen=True)
class Shares:
    """The blocks that each rank writes from its own parameters, and all transfers, in the order of the layers."""

    writer: dict[BlockKey, list[int]]  # per node that holds the block, the rank that writes it there
    transfers: list[Transfer]

    def of(self, rank: int) -> list[Transfer]:
        """Return the transfers that `rank` sends or receives."""
        return [one for one in self.transfers if rank in (one.sender, one.receiver)]


def share_out(sizes: Sizes, nodes: Sequence[int]) -> Shares:
    """Choose for each node the ranks that write its blocks. `nodes` is the index of every rank's node.

    Larger blocks are assigned first, each to the least loaded rank. The first node that holds a block sends it to nodes
    that do not. Every rank that calls this function with the same arguments gets the same result.
    """
    counts = {key: count for of_rank in sizes for key, count in of_rank}
    writer: dict[BlockKey, list[int]] = {key: [] for key in counts}
    load = [0] * len(nodes)
    absent: list[tuple[BlockKey, list[int]]] = []  # a block and the ranks of a node that lacks it
    for node in sorted(set(nodes)):
        members = [rank for rank, index in enumerate(nodes) if index == node]
        of_node = owners([of_rank if nodes[rank] == node else [] for rank, of_rank in enumerate(sizes)])
        for key in counts:
            if key in of_node:
                writer[key].append(of_node[key])
                load[of_node[key]] += counts[key]
            else:
                absent.append((key, members))
    transfers = []
    for key, members in sorted(absent, key=lambda pair: -counts[pair[0]]):
        receiver = min(members, key=lambda rank: (load[rank], rank))
        load[receiver] += counts[key]
        transfers.append(Transfer(key, writer[key][0], receiver))
    return Shares(writer, sorted(transfers, key=lambda one: (layer_of(one.key[0]), one.key, one.receiver)))


def exchange(
    transfers: Sequence[Transfer],
    rank: int,
    buffer_of: Callable[[BlockKey], Tensor],
    received: Callable[[BlockKey], None],
) -> None:
    """Send and receive `transfers`, each to or from `rank`, over the default process group, one layer at a time.

    `buffer_of` gives the bytes [n] uint8 of a block to send or to receive into. `received` is called per arrived block.
    """
    for _, group in groupby(transfers, key=lambda one: layer_of(one.key[0])):
        of_layer = list(group)
        operations = [
            dist.P2POp(dist.isend, buffer_of(one.key), one.receiver)
            if one.sender == rank
            else dist.P2POp(dist.irecv, buffer_of(one.key), one.sender)
            for one in of_layer
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for one in of_layer:
            if one.receiver == rank:
                received(one.key)
