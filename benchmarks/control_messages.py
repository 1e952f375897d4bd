"""Time of a step's control messages at up to 16,384 ranks: agreements, metrics, memory and reports of the weight sync.

    python benchmarks/control_messages.py

`reduced` runs `host_messages.all_reduce` itself: every rank is a thread with a clock of its own, and a message arrives
its latency after it was sent. Above 1,024 ranks the time is computed from rounds (marked *). `gathered` is computed:
the same messages as gathers of Python objects on gloo's rings, with the sizes of objects with two ranks. Latency: 10 us
within a node of 8 ranks, 50 us between nodes, and 1 GB/s.
"""

from __future__ import annotations

import argparse
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megagrpo.platform.parallel import host_messages

SIZES = (8, 64, 256, 1024, 4096, 16384)
RANKS_PER_NODE = 8
INSIDE, BETWEEN, BYTES_PER_SECOND = 10e-6, 50e-6, 1e9
LARGEST_RUN = 1024  # ranks as threads


@dataclass(frozen=True)
class Control:
    """Messages of one step. `bytes` and `gathered_bytes` are of one rank's tensor and pickled object."""

    name: str
    count: int
    bytes: Callable[[int], int]  # by the number of ranks
    gathered_bytes: int


# of a synchronous step with one optimizer step and a weight sync over p2p; the test counts them in a run
STEP = (
    Control("request to stop", 2, lambda ranks: 8, 43),
    Control("generated", 1, lambda ranks: 16, 60),
    Control("scored", 1, lambda ranks: 32, 43),
    Control("groups of the token log", 1, lambda ranks: 64, 0),
    Control("metrics and finite gradients", 1, lambda ranks: 24 * 32, 1600),
    Control("sync: weights checked", 1, lambda ranks: 8, 420),
    Control("sync: weights prepared", 1, lambda ranks: 8, 0),
    Control("sync: servers", 2, lambda ranks: 8, 0),
    Control("sync: group and plan", 1, lambda ranks: 32, 0),
    Control("sync: failures", 1, lambda ranks: 16, 0),
    Control("sync: reports", 1, lambda ranks: 32 * ranks, 190),
    Control("sync: verified", 1, lambda ranks: 48, 90),
    Control("sync: resumed", 1, lambda ranks: 8, 43),
    Control("folder of the run", 1, lambda ranks: 16, 60),
    Control("memory", 1, lambda ranks: 24, 90),
)


def latency(rank: int, peer: int, num_bytes: int) -> float:
    """Return the seconds from a message's start to its arrival."""
    return (INSIDE if rank // RANKS_PER_NODE == peer // RANKS_PER_NODE else BETWEEN) + num_bytes / BYTES_PER_SECOND


class VirtualRanks:
    """Ranks as threads of this process, with the calls of torch.distributed that `host_messages` uses."""

    def __init__(self, size: int):
        self.size, self.own = size, threading.local()
        self.messages: dict[tuple[int, int], queue.SimpleQueue[tuple[Tensor, float]]] = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()
        self.calls = SimpleNamespace(
            get_rank=lambda group: self.own.rank,
            get_world_size=lambda group: self.size,
            isend=self._send,
            irecv=self._recv,
        )

    def all_reduce(self, values: Callable[[int], Tensor]) -> tuple[list[Tensor], float]:
        """Reduce `values(rank)` over the ranks. Return each rank's result, and the time on the slowest rank's clock."""
        results: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            self.own.rank, self.own.clock = rank, 0.0
            results[rank] = host_messages.all_reduce(values(rank), "sum", None), self.own.clock

        with mock.patch.object(host_messages, "dist", self.calls):
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return [result for result, _ in results], max(clock for _, clock in results)

    def _queue(self, sender: int, receiver: int) -> queue.SimpleQueue[tuple[Tensor, float]]:
        with self.lock:
            return self.messages[sender, receiver]

    def _send(self, tensor: Tensor, group: object, group_dst: int) -> None:
        arrival = self.own.clock + latency(self.own.rank, group_dst, tensor.nbytes)
        self._queue(self.own.rank, group_dst).put((tensor.clone(), arrival))

    def _recv(self, tensor: Tensor, group: object, group_src: int) -> None:
        sent, arrival = self._queue(group_src, self.own.rank).get()
        tensor.copy_(sent)
        self.own.clock = max(self.own.clock, arrival)


def reduced_seconds(ranks: int, num_bytes: int) -> float:
    """Compute the time of `all_reduce` over a power of two of ranks."""
    bits = range(ranks.bit_length() - 1)
    if num_bytes <= host_messages.LONG_BYTES:
        return sum(latency(0, 1 << bit, num_bytes) for bit in bits)
    return sum(2 * latency(0, 1 << bit, num_bytes >> (bit + 1)) for bit in bits)


def run_seconds(ranks: int, values: Tensor) -> float:
    """Return the time of `all_reduce` with ranks as threads."""
    return VirtualRanks(ranks).all_reduce(lambda rank: values)[1]


def gathered_seconds(ranks: int, num_bytes: int) -> float:
    """Compute the time of an object gather: two rings, of sizes and of objects, each as long as one chunk's way."""
    nodes = -(-ranks // RANKS_PER_NODE)
    hops = (ranks - nodes) * INSIDE + (nodes if nodes > 1 else 0) * BETWEEN
    return 2 * hops + (ranks - 1) * (8 + num_bytes) / BYTES_PER_SECOND


@dataclass(frozen=True)
class Row:
    """The control messages of one step. `runs`: `reduced` was run, not computed."""

    ranks: int
    messages: int
    reduced: float  # seconds
    gathered: float  # seconds
    runs: bool


def table(sizes: Sequence[int] = SIZES, largest_run: int = LARGEST_RUN) -> list[Row]:
    """Return a row for each number of ranks, a power of two."""
    rows = []
    for ranks in sizes:
        runs, reduced, gathered = ranks <= largest_run, 0.0, 0.0
        for control in STEP:
            num_bytes = control.bytes(ranks)
            values = torch.zeros(num_bytes // 8, dtype=torch.int64)
            seconds = run_seconds(ranks, values) if runs else reduced_seconds(ranks, num_bytes)
            reduced += control.count * seconds
            gathered += control.count * gathered_seconds(ranks, control.gathered_bytes) if control.gathered_bytes else 0
        rows.append(Row(ranks, sum(control.count for control in STEP), reduced, gathered, runs))
    return rows


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'ranks':>6} {'messages':>9} {'reduced':>12} {'gathered':>12}")
    for row in table():
        mark = " " if row.runs else "*"
        print(f"{row.ranks:>6} {row.messages:>9} {1e3 * row.reduced:>8.2f} ms{mark} {1e3 * row.gathered:>9.1f} ms")
    print("* computed; gathered is always computed")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
