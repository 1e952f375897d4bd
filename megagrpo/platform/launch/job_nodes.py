"""The nodes of a job, as one of them knows them."""

from __future__ import annotations

from typing import NamedTuple

from megagrpo.platform.process.loopback import LOOPBACK_ADDRESS


class Nodes(NamedTuple):
    """`rank` is this node's index; `address` and `port` are the first node's. One node needs neither."""

    rank: int = 0
    num_nodes: int = 1
    address: str = LOOPBACK_ADDRESS
    port: int = 0


ONE_NODE = Nodes()
