"""What a way of moving weights must offer, on the trainer's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megagrpo.engine.protocol import Engine, WeightUpdate
from megagrpo.families.blocks import Block

Weights = Iterable[tuple[str, Tensor, Sequence[Block]]]  # parameters with their names, and the blocks that they hold


class Ranks(Protocol):
    """The trainer's ranks, as `megagrpo.parallel.layout.Layout`."""

    world_rank: int

    def all_gather_objects(self, obj: Any, within: float | None = None) -> list[Any]: ...


class Stays:
    """A trainer that leaves everything on its device, whatever comes next; `megagrpo.trainer.offload.Offload` is one that does not."""

    away = False  # whether anything is not there

    def keep_everything(self) -> None:
        """For log-probs, training and checkpoints."""

    def keep_weights(self) -> None:
        """For a weight sync: the policy's weights."""

    def keep_nothing(self) -> None:
        """For servers that generate."""


@dataclass(frozen=True)
class Given:
    """What one rank gave away in one update."""

    num_bytes: int
    checksum_seconds: float = 0.0


class Update(WeightUpdate, Protocol):
    """One update on its way."""

    def send(self) -> Given:
        """Give this rank's part, while the engine takes it in. Raises when that fails; every rank calls it."""

    def verify(self, reports: Sequence[dict[str, Any]]) -> None:
        """Rank 0: prove by what the workers report that every server got all of it, unchanged; WeightSyncError names the rank, or the
        worker, and the tensor otherwise."""

    def verify_bytes(self, given: int, taken: int) -> None:
        """WeightSyncError unless these bytes, of all ranks and of all workers, are those that had to move."""

    def give_up(self, why: str) -> None:
        """Rank 0: the engine is done with it, well or not. Ranks that still wait for a server, as for one that died, come to an end."""

    def done(self) -> None:
        """Every rank: no worker looks at this update any more, however it ended."""


class Transport(Protocol):
    """Makes updates. One per rank."""

    def prepare(self, found: list[tuple[str, Tensor, Sequence[Block]]], version: int, engine: Engine | None) -> Update:
        """An update to the parameters as they are now. Collective. WeightSyncError on every rank, before the engine hears of it."""

    def all_gather(self, told: Any) -> list[Any]:
        """What every rank has to tell of an update, in rank order. WeightSyncError where ranks are late, and the transport can tell."""

    def close(self) -> None:
        """Free what it holds. Does nothing a second time."""


def key_of(block: Block) -> tuple:
    """What tells one block from others; the same for copies on other ranks."""
    return block.name, tuple(block.shape), block.box
