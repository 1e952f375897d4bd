"""Large messages between replicas over gloo: rows of all leaders, rows from leader to leader, and parts to rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.platform.parallel.layout import Layout

PART_END, PART_ERROR = -1, -2  # sent in place of the size of a part
Sending = tuple[dist.Work, torch.Tensor]  # what ends a message, and the tensor, which must live until then


class PartError(RuntimeError):
    """A rank could not make the parts that rank 0 waits for; the message names the rank and its error."""


def gather_rows(layout: Layout, own: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return the bytes of the leader of each replica, on every rank: an all-gather of leaders, a broadcast in replicas.

    `own` are a leader's bytes [n] uint8. `sizes` are the numbers of bytes by `dp_rank`, the same on every rank.
    Collective.
    """
    table = torch.zeros(layout.dp_size, max(sizes), dtype=torch.uint8)
    if layout.leaders is not None:
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.size] = torch.from_numpy(own)
        dist.all_gather(list(table.unbind(0)), padded, group=layout.leaders)
    dist.broadcast(table, src=layout.leader_of(layout.dp_rank), group=layout.replica)
    return [row[:size].numpy() for row, size in zip(table, sizes, strict=True)]


def exchange_rows(layout: Layout, own: np.ndarray, sent: Sequence[int], received: Sequence[int]) -> np.ndarray:
    """Return the words that the leaders of all replicas send to this leader: an all-to-all. Collective over leaders.

    `own` are the words [n] int32 that this leader sends, by destination. `sent` and `received` are the numbers of words
    to and from each replica.
    """
    table = torch.empty(sum(received), dtype=torch.int32)
    dist.all_to_all_single(table, torch.from_numpy(own), list(received), list(sent), group=layout.leaders)
    return table.numpy()


def share_rows(layout: Layout, rows: np.ndarray, group: dist.ProcessGroup) -> np.ndarray:
    """Return the words of this replica's leader on the ranks of `group`, all of this replica. `rows` have their size on
    every rank. Collective over `group`."""
    table = torch.from_numpy(rows)
    dist.broadcast(table, src=layout.leader_of(layout.dp_rank), group=group)
    return table.numpy()


def parts_to_first_rank(
    layout: Layout, owners: Sequence[int], parts: Callable[[int], Iterable[bytes]]
) -> Iterator[bytes]:
    """Yield on rank 0, in order, `parts(i)` of every turn i, made on rank `owners[i]`. Collective: every rank must
    exhaust the iterator, which yields nothing on other ranks.

    Rank 0 holds one part at a time. Raises PartError at the end, on rank 0 alone, if a rank failed to make its parts.
    """
    failure = ""
    for turn, owner in enumerate(owners):
        if owner == layout.world_rank == 0:
            try:
                yield from parts(turn)
            except Exception as error:
                failure = failure or f"rank 0: {type(error).__name__}: {error}"
        elif layout.world_rank == owner:
            _send_parts(layout, parts(turn))
        elif layout.world_rank == 0:
            while (size := _receive_size(layout, owner)) != PART_END:
                if size == PART_ERROR:
                    size = _receive_size(layout, owner)
                    text = _receive_part(layout, owner, size).decode()
                    failure = failure or f"rank {owner}: {text}"
                else:
                    yield _receive_part(layout, owner, size)
    if failure:
        raise PartError(failure)


def _send_parts(layout: Layout, parts: Iterable[bytes]) -> None:
    """Send the parts to rank 0, then the end. An error ends them and travels as a text.

    Each part is made while the part before it waits for rank 0 or travels. Two parts are in memory.
    """
    sent: list[Sending] = []
    try:
        for part in filter(None, parts):
            wait(sent)
            sent = _send(layout, part)
    except Exception as error:
        wait(sent)
        text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
        sent = [begin_send(torch.tensor([PART_ERROR]), 0, layout.cpu_group), *_send(layout, text)]
    wait([*sent, begin_send(torch.tensor([PART_END]), 0, layout.cpu_group)])


def _send(layout: Layout, part: bytes) -> list[Sending]:
    table = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    return [begin_send(each, 0, layout.cpu_group) for each in (torch.tensor([len(part)]), table)]


def _receive_size(layout: Layout, owner: int) -> int:
    return int(receive(torch.empty(1, dtype=torch.int64), owner, layout.cpu_group))


def _receive_part(layout: Layout, owner: int, size: int) -> bytes:
    return receive(torch.empty(size, dtype=torch.uint8), owner, layout.cpu_group).numpy().tobytes()


def begin_send(table: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Sending:
    """Begin to send to world rank `rank`, and return what ends it with the tensor, which must live until then."""
    work = dist.isend(table, dst=rank, group=group)
    assert work is not None, "this rank belongs to the group"
    return work, table


def wait(sent: Iterable[Sending]) -> None:
    """Wait until all tensors are sent."""
    for work, _ in sent:
        work.wait()


def receive(table: torch.Tensor, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Fill `table`, contiguous, with the tensor that world rank `rank` sends by `begin_send`, and return it."""
    dist.recv(table, src=rank, group=group)
    return table
