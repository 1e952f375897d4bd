"""The notes that trainer ranks and workers leave on the board (`exchange.Board`) in one `p2p` update, and the request
that starts it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class UpdateKeys:
    """The keys of the notes of one attempt of an update. All of them begin with `update`."""

    update: str

    @property
    def members(self) -> str:
        """Key of rank 0's decision, a `Members`."""
        return f"{self.update}/members"

    @property
    def stop(self) -> str:
        """Key of the reason why every process must stop waiting."""
        return f"{self.update}/stop"

    def worker(self, number: int) -> str:
        """Key of the note with which worker `number`, counted over all servers, takes part: the key of its boxes, and
        its group."""
        return f"{self.update}/worker{number}"

    def report(self, number: int) -> str:
        """Key of the report of worker `number`, counted over all servers."""
        return f"{self.update}/report{number}"


@dataclass(frozen=True)
class DirectRequest:
    """The data that the workers of one server need for an update from the trainer's ranks. It travels as JSON.

    - `host`, `port`, `secret`: the board. `roster`: key of the roster's note. `update`: prefix of this update's notes.
    - `device`: type of the device that holds the ranks' weights. `dtype`: key of DTYPES.
    - `limit`: elements in one message. `seconds`: time left for the update.
    - `ranks`: number of trainer ranks. `first_worker`: index of this server's first worker, counted over all servers.
    """

    host: str
    port: int
    secret: str = field(repr=False)
    roster: str
    update: str
    device: str
    dtype: str
    limit: int
    ranks: int
    first_worker: int
    seconds: float

    @property
    def keys(self) -> UpdateKeys:
        """The keys of this update's notes."""
        return UpdateKeys(self.update)


@dataclass(frozen=True)
class Members:
    """Rank 0's decision about one update: the key of each worker's boxes, in the order of the workers, and the process
    group's name."""

    boxes: list[str]
    group: str


def content_key(kind: str, data: Any) -> str:
    """Return the key of a note with the JSON value `data`: equal values have the same key."""
    return f"{kind}-{hashlib.blake2b(json.dumps(data).encode(), digest_size=12).hexdigest()}"
