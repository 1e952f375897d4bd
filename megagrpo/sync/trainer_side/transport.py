"""The interface of a weight transport on the trainer's side: `Transport` and `Update`, with six methods together.

A transport moves the slices of one weight version from the trainer's ranks to vLLM's workers, where a `Receiver`
(`sync/vllm_side/receiver.py`) takes them. `config/sections/transport_table.py` registers both ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from megagrpo.config.sections.transport_table import TRANSPORTS
from megagrpo.engine.client import VllmEngine
from megagrpo.families.shared.blocks import Block
from megagrpo.platform.parallel.host_messages import Reduction
from megagrpo.platform.process import user_code
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.sync.trainer_side.node_shares import BlockKey, Nodes
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import TensorIndex


class Parameter(Protocol):
    """A parameter [...] in any dtype: a tensor, or an object that computes one, such as merged adapters."""

    def detach(self) -> Tensor:
        """Return the values [...]. May compute them on each call."""


Weight = tuple[str, Parameter, Sequence[Block]]  # parameter name, parameter, and the blocks in it
Weights = Iterable[Weight]


class Ranks(Protocol):
    """The trainer's ranks; `megagrpo.platform.parallel.layout.Layout` implements it."""

    @property
    def world_rank(self) -> int:
        """Index of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, values: Tensor, reduction: Reduction = "sum", within: float | None = None) -> Tensor:
        """Return `values` reduced over all ranks. Raises TimeoutError when one takes over `within` seconds."""

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        """Return the `obj` of rank `source`."""

    def all_gather_objects(self, obj: Any, within: float | None = None) -> list[Any]:
        """Gather `obj` from all ranks, in rank order. Raises TimeoutError when one takes over `within` seconds."""


@dataclass(frozen=True)
class Handover:
    """What a weight sync calls when the GPU's memory changes hands. Collective; by default nothing moves.

    `before_sending` loads the policy's weights to the GPU: they are read next. `before_serving` frees the trainer's
    GPU memory: the engine has the new weights, verified, and allocates its KV cache next.
    """

    before_sending: Callable[[], None] = lambda: None
    before_serving: Callable[[], None] = lambda: None


NO_HANDOVER = Handover()


CPU = torch.device("cpu")


@dataclass(frozen=True)
class TransportSettings:
    """What a transport may use of the config. `device` holds this rank's weights. `seconds` limits a phase of a sync,
    `megabytes` a message, in MiB. `nodes` are the nodes of servers that the ranks' hosts share, if several. `relay`:
    servers pass weights on to each other, where the ranks cannot send as fast as the servers receive."""

    device: torch.device = CPU
    seconds: float | None = None
    megabytes: float = 64.0
    nodes: Nodes | None = None
    relay: bool = False


DEFAULT_SETTINGS = TransportSettings()


@dataclass(frozen=True)
class SendReport:
    """The bytes that one rank sent in one update, the seconds it spent on checksums, and the checksums, below 2^64,
    that `verify` needs, in an order that the transport chooses. `WeightSync` sets `seconds`, and `problem` if sending
    failed."""

    num_bytes: int
    checksum_seconds: float = 0.0
    checksums: tuple[int, ...] = ()
    seconds: float = 0.0
    problem: str = ""


@dataclass(kw_only=True)
class Update(ABC):
    """One update on one rank. `receiver` is the class at the other end: `FILE.py:Class` or `package.module:Class`.

    `servers` (url -> number of workers) must all get the update; None: every live server, including any that returns
    before the update after next. When `stopped` is not empty, no worker takes part any longer, for this reason.
    """

    index: TensorIndex
    receiver: str
    servers: Mapping[str, int] | None = None
    stopped: str = ""

    @abstractmethod
    def send(self, task: Task = SILENT_TASK) -> SendReport:
        """Send this rank's part, while the engine loads it. Every rank calls it. `task` counts the bytes. Raises when
        sending fails."""

    @abstractmethod
    def request(self, server: str) -> dict[str, Any]:
        """Return what the receivers in the workers of `server` need, as JSON values. Called on rank 0."""

    def reports(self, server: str) -> list[dict[str, Any]] | None:
        """Return one report of each worker of `server`, as far as known: the one that the worker made, or `worker` and
        the `activity` it is in. None: request the reports from the server. Called on rank 0."""
        return None

    @abstractmethod
    def verify(self, sent: Sequence[SendReport], reports: Sequence[dict[str, Any]]) -> None:
        """Check that every server received everything unchanged, on rank 0. `sent` has one report per rank, `reports`
        one per worker. Raises WeightSyncError, naming the rank or the worker, and the tensor, otherwise."""


class Transport:
    """One rank's end of a transport. Construction is collective. `receiver` is the class at the other end.

    `refills`: a server that returns can get the last update from rank 0 alone. Otherwise it waits for the next sync.
    """

    receiver: ClassVar[str]
    refills: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, dtype: str, settings: TransportSettings = DEFAULT_SETTINGS):
        self.ranks, self.dtype, self.settings = ranks, dtype, settings

    def prepare(
        self, weights: Sequence[Weight], version: int, engine: VllmEngine | None
    ) -> AbstractContextManager[Update]:
        """Check the weights, and return an update with them; leaving it frees its memory. Collective. Raises
        WeightSyncError on every rank, before the engine receives any request."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the transport's resources. Does nothing on a second call."""


def transport_class(name: str) -> type[Transport]:
    """Return the class of the transport `name`: one of TRANSPORTS, or the user's own as `FILE.py:Class` or
    `package.module:Class`. Raises ValueError when it cannot be loaded."""
    try:
        named = TRANSPORTS[name].trainer_side if name in TRANSPORTS else name
        return user_code.load_subclass(named, Transport, "prepare")
    except ValueError as error:
        raise ValueError(f"rollout.weight_sync_transport: {name} {error}") from error


def own_or_raise[T](ranks: Ranks, action: Callable[[], T]) -> T:
    """Run `action` on every rank, and return this rank's result. Raises WeightSyncError on every rank when it fails on
    any; the error names all ranks that failed. Only then do objects travel."""
    result: Any = None
    problem = None
    try:
        result = action()
    except Exception as error:
        problem = f"rank {ranks.world_rank}: {error}"
    if ranks.all_reduce(torch.tensor(int(problem is not None)), "max"):
        raise WeightSyncError("; ".join(filter(None, ranks.all_gather_objects(problem))))
    return result


def gather_or_raise[T](ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Like `own_or_raise`, but return all results, which must be picklable, in rank order. For a first update only."""
    return ranks.all_gather_objects(own_or_raise(ranks, action))


def of_first_rank[T](ranks: Ranks, own: T, known: T | None) -> T:
    """Return rank 0's object. It travels only if it differs from `known`, its value of the last time on every rank."""
    differs = ranks.all_reduce(torch.tensor(int(ranks.world_rank == 0 and own != known)), "max")
    result: Any = ranks.broadcast_object(own) if differs else known
    return result


def outcome_of_first_rank[E](ranks: Ranks, outcome: Sequence[float] | E, count: int) -> list[float] | E:
    """Return rank 0's outcome: `count` numbers, or an error. An error alone travels as an object."""
    numbers = [0.0, *outcome] if isinstance(outcome, (tuple, list)) else [1.0, *[0.0] * count]
    if ranks.world_rank:
        numbers = [-math.inf] * (1 + count)
    failed, *agreed = ranks.all_reduce(torch.tensor(numbers, dtype=torch.float64), "max").tolist()
    return ranks.broadcast_object(outcome) if failed else agreed


def reports_of_ranks(ranks: Ranks, own: SendReport) -> list[SendReport]:
    """Return the reports of all ranks, in rank order. Only reports of failed ranks travel as objects. Collective."""
    failed, widest = ranks.all_reduce(torch.tensor([int(bool(own.problem)), len(own.checksums)]), "max").tolist()
    if failed:
        return ranks.all_gather_objects(own)
    table = np.zeros((ranks.world_size, 4 + widest), np.uint64)  # a rank fills its own row, so the sum is exact
    table[ranks.world_rank, : 4 + len(own.checksums)] = own.num_bytes, 0, 0, len(own.checksums), *own.checksums
    table[ranks.world_rank, 1:3].view(np.float64)[:] = own.checksum_seconds, own.seconds
    table = ranks.all_reduce(torch.from_numpy(table.view(np.int64))).numpy().view(np.uint64)
    times = table[:, 1:3].view(np.float64).tolist()
    return [
        SendReport(num_bytes, checking, tuple(checksums[:count]), sending)
        for (num_bytes, _, _, count, *checksums), (checking, sending) in zip(table.tolist(), times, strict=True)
    ]


def key_of(block: Block) -> BlockKey:
    """Return the identity of a block. Replicas on other ranks have the same key."""
    return block.name, tuple(block.shape), block.box
