"""What trainer ranks and workers store (`exchange.Store`) in one `p2p` update, and the request that starts it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class UpdateKeys:
    """The keys of one attempt of an update."""

    attempt: int

    @property
    def members(self) -> str:
        """Key of rank 0's decision, a `Members`."""
        return f"update{self.attempt}/members"

    @property
    def stop(self) -> str:
        """Key of the reason why every process must stop waiting."""
        return f"update{self.attempt}/stop"

    def worker(self, number: int) -> str:
        """Key of the message in which worker `number`, counted over all servers, leaves its box key and its group."""
        return f"update{self.attempt}/worker{number}"

    def report(self, number: int) -> str:
        """Key of the report of worker `number`, counted over all servers."""
        return f"update{self.attempt}/report{number}"


@dataclass(frozen=True)
class DirectRequest:
    """The data that the workers of one server need for an update from the trainer's ranks. It travels as JSON.

    - `host`, `port`, `secret`: the store. `rank_boxes`: key of the ranks' boxes. `attempt`: its number.
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
    rank_boxes: str = ""
    ranks: int = 0
    first_worker: int = 0
    seconds: float = 0.0

    @property
    def keys(self) -> UpdateKeys:
        """The keys of this update."""
        return UpdateKeys(self.attempt)


@dataclass(frozen=True)
class Members:
    """Rank 0's decision about one update: the key of each worker's boxes, in worker order, and the group's name."""

    boxes: list[str]
    group: str


def content_key(kind: str, data: Any) -> str:
    """Return the key of the JSON value `data`: equal values have the same key."""
    return f"{kind}-{hashlib.blake2b(json.dumps(data).encode(), digest_size=12).hexdigest()}"
