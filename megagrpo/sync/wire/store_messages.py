"""What trainer ranks and workers store (`store_exchange.Store`) in one `p2p` update, and the request that starts it.

Rank 0 serves the store and is the only rank that reads it. Each worker reads one short decision per update, and its
part of a plan when the plan is new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megagrpo.platform.rendezvous.store_exchange import Store
from megagrpo.sync.wire.rank_boxes import WorkerBoxes, boxes_of_json


@dataclass(frozen=True)
class UpdateKeys:
    """The keys of one attempt of an update."""

    attempt: int

    @property
    def decision(self) -> str:
        """Key of rank 0's `Decision`."""
        return f"update{self.attempt}/decision"

    def worker(self, number: int) -> str:
        """Key of the message in which worker `number`, counted over all servers, leaves its box key, group and plan."""
        return f"update{self.attempt}/worker{number}"

    def report(self, number: int) -> str:
        """Key of the report of worker `number`, counted over all servers."""
        return f"update{self.attempt}/report{number}"


def part_key(plan: int, number: int) -> str:
    """Return the key of the `PlanPart` of worker `number`, counted over all servers."""
    return f"plan{plan}/worker{number}"


@dataclass(frozen=True)
class DirectRequest:
    """The data that the workers of one server need for an update from the trainer's ranks. It travels as JSON.

    - `host`, `port`, `secret`: the store. `rank_boxes`: the ranks' boxes (`RankBoxes.packed`). `attempt`: its number.
    - `device`: type of the device that holds the ranks' weights. `dtype`: key of ENGINE_DTYPES.
    - `limit`: elements in one message. `seconds`: time left for the update.
    - `ranks`: number of trainer ranks. `first_worker`: index of this server's first worker, counted over all servers.
    """

    host: str
    port: int
    secret: str = field(repr=False)
    attempt: int
    device: str
    dtype: str
    limit: int
    ranks: int
    rank_boxes: str = field(default="", repr=False)
    first_worker: int = 0
    seconds: float = 0.0

    @property
    def keys(self) -> UpdateKeys:
        """The keys of this update."""
        return UpdateKeys(self.attempt)


@dataclass(frozen=True)
class Decision:
    """Rank 0's decision about one update: the number of the plan, the name of the process group, and how many
    workers take part.

    `stop`: why the update has failed instead. Then no worker takes part.
    """

    plan: int = 0
    group: str = ""
    workers: int = 0
    stop: str = ""


@dataclass(frozen=True)
class PlanPart:
    """What one worker needs to find its messages in a plan. It travels as JSON.

    Its slices are those of worker `head`. `choices` are the rows of this worker in `RankBoxes.choices`, without the
    worker. `feeder` is the worker that passes the slices on to this one, and `next` the worker that this one passes
    them on to, each with its number and name, if any.
    """

    head: int
    choices: list[tuple[int, int, int]]
    feeder: tuple[int, str] | None = None
    next: tuple[int, str] | None = None


def content_key(kind: str, data: Any) -> str:
    """Return the key of the JSON value `data`: equal values have the same key."""
    return f"{kind}-{hashlib.blake2b(json.dumps(data).encode(), digest_size=12).hexdigest()}"


def take_boxes(store: Store, keys: Sequence[str]) -> list[WorkerBoxes]:
    """Return the boxes of each worker. `keys` are the keys of the workers' boxes in the store; alike workers share a
    key, and then one object. Raises WeightSyncError."""
    distinct = sorted(set(keys))
    boxes = dict(zip(distinct, map(boxes_of_json, store.find_all(distinct)), strict=True))
    return [boxes[key] for key in keys]
