"""Plans of a `p2p` sync on the trainer's side: rank 0 makes a plan for all workers, and each rank finds its messages.

Rank 0 alone looks at all tensors and workers. It chooses the sending rank of every slice that several ranks hold. With
these choices a rank computes its messages from its own tensors, and a worker its messages from its own boxes.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import torch

from megagrpo.families.shared.boxes import Box, brackets, missing, size, whole
from megagrpo.platform.rendezvous.store_exchange import Store
from megagrpo.sync.trainer_side.node_shares import BlockKey
from megagrpo.sync.trainer_side.transport import Ranks
from megagrpo.sync.wire.messages import Message, Round, layer_text, rounds
from megagrpo.sync.wire.rank_boxes import RankBoxes, WorkerBoxes
from megagrpo.sync.wire.store_messages import PlanPart, part_key, take_boxes
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.sync_plan import layer_of


@dataclass(frozen=True)
class ServerPlan:
    """What rank 0 knows about plan `number`: per worker the key of its boxes in the store and the first worker of its
    chain, and the elements that all workers want."""

    number: int
    boxes: list[str]
    heads: list[int]
    elements: int


@dataclass(frozen=True)
class PlanNews:
    """What rank 0 tells the other ranks about plan `number`: the boxes of the workers that ranks send to, and the table
    of choices (`RankBoxes.choices`)."""

    number: int
    boxes: dict[int, WorkerBoxes]
    choices: np.ndarray


def collect_boxes(ranks: Ranks, keys: list[BlockKey]) -> RankBoxes:
    """Return the boxes of all ranks; `keys` are the keys of this rank's blocks. Collective."""
    alike = _gather_distinct(ranks, keys)
    # tensor -> its shape, and box -> the indices into `alike` of those that hold it
    tensors: dict[str, tuple[tuple[int, ...], dict[Box, list[int]]]] = {}
    for index, (keys_of, _) in enumerate(alike):
        for name, shape, box in keys_of:
            tensors.setdefault(name, (shape, {}))[1].setdefault(box, []).append(index)
    ranks_of = {
        indices: sorted(rank for index in indices for rank in alike[index][1])
        for indices in {tuple(indices) for _, boxes in tensors.values() for indices in boxes.values()}
    }
    return RankBoxes(
        {
            name: (tensors[name][0], {box: ranks_of[tuple(indices)] for box, indices in tensors[name][1].items()})
            for name in sorted(tensors, key=lambda name: (layer_of(name), name))
        }
    )


def _gather_distinct(ranks: Ranks, keys: list[BlockKey]) -> list[tuple[list[BlockKey], list[int]]]:
    """Return the distinct ones of all ranks' `keys`, each with its ranks, sorted. Collective.

    Every rank receives 16 bytes per rank, and each distinct list once, compressed.
    """
    packed, rank = zlib.compress(msgspec.msgpack.encode(keys)), ranks.world_rank
    facts = torch.zeros(2, ranks.world_size, dtype=torch.int64)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    facts[:, rank] = torch.tensor([int.from_bytes(digest, "little", signed=True), len(packed)])
    digests, sizes = ranks.all_reduce(facts).tolist()
    alike: dict[int, list[int]] = {}
    for number, key in enumerate(digests):
        alike.setdefault(key, []).append(number)
    groups = list(alike.values())
    ends = list(itertools.accumulate((sizes[group[0]] for group in groups), initial=0))
    everything = torch.zeros(ends[-1], dtype=torch.uint8)
    for group, start in zip(groups, ends, strict=False):
        if group[0] == rank:
            everything[start : start + len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    data = ranks.all_reduce(everything).numpy().tobytes()
    return [
        (msgspec.msgpack.decode(zlib.decompress(data[start:end]), type=list[BlockKey]), group)
        for group, (start, end) in zip(groups, itertools.pairwise(ends), strict=True)
    ]


def make_plan(
    number: int, rank_boxes: RankBoxes, store: Store, boxes: list[str], servers: Mapping[str, int], num_relayed: int
) -> tuple[ServerPlan, PlanNews]:
    """Make plan `number` and store each worker's part of it, on rank 0.

    `boxes` are the keys of the workers' boxes in the store, and `servers` the number of workers per url, in this order.
    With `num_relayed` ranks, above 0, servers relay to each other what these cannot send as fast as workers receive.
    Raises WeightSyncError when no worker of a server takes some part of a tensor.
    """
    workers = take_boxes(store, boxes)
    _check_coverage(rank_boxes, servers, boxes, workers)
    feeder = feeders(boxes, list(servers.values()), num_relayed) if num_relayed else [NO_FEEDER] * len(boxes)
    head, following = heads(feeder), {source: worker for worker, source in enumerate(feeder)}
    fed_by_ranks = {first: workers[first] for first in sorted(set(head))}
    choices = rank_boxes.choices(rank_boxes.sources_for(fed_by_ranks))
    of_head = {first: choices[choices[:, 0] == first, 1:].tolist() for first in fed_by_ranks}
    peers = list(enumerate(worker_names(servers)))
    for worker, first in enumerate(head):
        ends = feeder[worker], following.get(worker, NO_FEEDER)
        part = PlanPart(first, of_head[first], *(peers[end] if end != NO_FEEDER else None for end in ends))
        store.put(part_key(number, worker), asdict(part))
    distinct, times = dict(zip(boxes, workers, strict=True)), Counter(boxes)
    elements = sum(
        times[key] * size(box) for key, wanted in distinct.items() for of_tensor in wanted.values() for box in of_tensor
    )
    return ServerPlan(number, boxes, head, elements), PlanNews(number, fed_by_ranks, choices)


def worker_names(servers: Mapping[str, int]) -> list[str]:
    """Return the description of each worker for errors, over all servers. `servers` has their number of workers."""
    return [f"worker {index} of {url}" for url, count in servers.items() for index in range(count)]


def messages_of(
    news: PlanNews, rank_boxes: RankBoxes, rank: int, tensors: Container[str], limit: int
) -> dict[Round, list[Message]]:
    """Return the messages of a rank, which holds parts of `tensors`, each with at most `limit` elements."""
    own = np.array([rank in ranks for ranks in rank_boxes.groups])
    sources = rank_boxes.sources(news.choices[own[news.choices[:, 1]]])
    return rounds(rank_boxes.transfers_to(news.boxes, sources, only=tensors), limit, source=rank)


def drifted(plan: ServerPlan, rank_boxes: RankBoxes, store: Store, layer: int, workers: tuple[int, int]) -> str:
    """Return the error text for two workers that want the same slices of a layer and received different values.

    The text names the ranks that sent the layer to only one of the workers, or else all that sent it to the first.
    """
    taken, first = take_boxes(store, plan.boxes), [plan.heads[worker] for worker in workers]
    transfers = rank_boxes.transfers_to({number: taken[number] for number in set(plan.heads)})
    of_layer = np.array([layer_of(name) == layer for name in transfers.names])[transfers.tensor]
    senders = [set(transfers.source[of_layer & (transfers.destination == head)].tolist()) for head in first]
    ranks = ", ".join(map(str, sorted(senders[0] ^ senders[1] or senders[0])))
    return f"replicas of {layer_text(layer)} on ranks {ranks} differ"


def _check_coverage(
    rank_boxes: RankBoxes, servers: Mapping[str, int], keys: list[str], workers: Sequence[WorkerBoxes]
) -> None:
    """Raises WeightSyncError, naming the tensor, when no worker of a server takes some part of it."""
    first, checked = 0, set()
    for server, count in servers.items():
        of_server = tuple(keys[first : first + count])
        boxes = dict(zip(of_server, workers[first : first + count], strict=True)).values()
        first += count
        if of_server in checked:
            continue
        for name, (shape, _) in rank_boxes.tensors.items():
            if uncovered := missing(whole(shape), [box for worker in boxes for box in worker.get(name, ())]):
                raise WeightSyncError(f"{server}: no worker read {name}{brackets(uncovered[0])}")
        checked.add(of_server)


NO_FEEDER = -1


# Servers of a `p2p` weight sync form chains: each passes what it receives on to the next, like a broadcast. Without
# chains the ranks send one copy of the model per server, so they bound the sync as soon as the servers have more
# workers than the trainer has ranks. In a chain the ranks send to the first server only. Every worker receives one copy
# and passes on one, and a network card does both at once.
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
