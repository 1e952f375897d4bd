"""The interface of a weight transport, on the trainer's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.protocol import WeightUpdate
from megagrpo.models.families.blocks import Block
from megagrpo.models.families.boxes import Box
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task


class Parameter(Protocol):
    """A parameter [...] in any dtype: a tensor, or an object that computes one, such as merged adapters."""

    def detach(self) -> Tensor:
        """Return the values [...]. May compute them on each call."""


Weight = tuple[str, Parameter, Sequence[Block]]  # parameter name, parameter, and the blocks in it
Weights = Iterable[Weight]
BlockKey = tuple[str, tuple[int, ...], Box]  # tensor, its full shape, and the part of it: equal for replicas of a block


class Ranks(Protocol):
    """The trainer's ranks; `megagrpo.platform.parallel.layout.Layout` implements it."""

    @property
    def world_rank(self) -> int:
        """Index of this rank."""

    def all_gather_objects(self, obj: Any, within: float | None = None) -> list[Any]:
        """Gather `obj` from every rank, in rank order. Raises TimeoutError when a rank does not join within `within`
        seconds."""


class Handover:
    """What a weight sync calls when the GPU's memory changes hands. Collective; this default moves nothing."""

    def before_sending(self) -> None:
        """Load the policy's weights to the GPU: they are read next."""

    def before_serving(self) -> None:
        """Free the trainer's GPU memory: the engine has the new weights, verified, and allocates its KV cache next."""


NO_HANDOVER = Handover()


@dataclass(frozen=True)
class SendReport:
    """The bytes that one rank sent in one update, the seconds it spent on checksums, and the checksums that other nodes
    need."""

    num_bytes: int
    checksum_seconds: float = 0.0
    checksums: tuple[int, ...] = ()  # of the blocks in this rank's files, in order; only for servers on several nodes


class TransportUpdate(WeightUpdate, Protocol):
    """One update in progress."""

    def send(self, task: Task = SILENT_TASK) -> SendReport:
        """Send this rank's part, while the engine loads it. Every rank calls it. `task` counts the bytes. Raises when
        sending fails."""

    def all_sent(self, reports: Sequence[SendReport]) -> None:
        """Rank 0: every rank has sent; `reports` has one report per rank. Raises WeightSyncError when two reports
        contradict each other."""

    def verify(self, reports: Sequence[dict[str, Any]]) -> None:
        """Check the workers' reports, on rank 0: every server received everything unchanged.

        Raises WeightSyncError, naming the rank or the worker, and the tensor, otherwise.
        """

    def verify_bytes(self, sent: int, received: int) -> None:
        """Raises WeightSyncError unless `sent` bytes of all ranks and `received` bytes of all workers are the bytes
        that had to move."""

    def give_up(self, why: str) -> None:
        """Rank 0: stop the ranks that still wait for a server, such as a dead one. The engine has finished, with or
        without success."""

    def done(self) -> None:
        """Every rank: release the update. No worker reads it any longer, with or without success."""


class Transport(Protocol):
    """Creates updates. Each rank has one transport."""

    def prepare(self, parameters: Sequence[Weight], version: int, engine: VllmEngine | None) -> TransportUpdate:
        """Create an update with the current parameters. Collective. Raises WeightSyncError on every rank, before the
        engine receives any request."""

    def all_gather(self, value: Any) -> list[Any]:
        """Gather `value` from every rank, in rank order. Raises WeightSyncError for late ranks, if the transport
        detects them."""

    def close(self) -> None:
        """Free the transport's resources. Does nothing on a second call."""


def key_of(block: Block) -> BlockKey:
    """Return the identity of a block. Replicas on other ranks have the same key."""
    return block.name, tuple(block.shape), block.box
