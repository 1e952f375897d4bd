"""Servers on every node: with `rollout.placement: colocated` on several nodes each node launches its own servers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.config import RolloutSection, RunConfig
from megagrpo.engine.http.access import address_of
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.node_agent import NodeAgent, NodeLaunchers
from megagrpo.engine.servers.serving import make_launcher
from megagrpo.loopback import LOOPBACK
from megagrpo.platform.parallel.agree import on_first_rank, run_and_agree, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.variables import ENVIRONMENT, number
from megagrpo.platform.rendezvous.store_exchange import Deadline, Store, own_address
from megagrpo.sync.trainer_side.node_shares import Nodes


@dataclass(frozen=True)
class NodeServers:
    """All nodes' servers: every rank's node, and this node's launcher on the node's first rank (None on others)."""

    of_ranks: tuple[int, ...]
    launcher: Launcher | None
    token: str


def node_of_each_rank(rollout: RolloutSection, nodes: int, layout: Layout) -> tuple[int, ...]:
    """Return the index of every rank's node, from the launcher's GROUP_RANK or LOCAL_WORLD_SIZE; all are 0 unless the
    run's servers share the hosts of several nodes. Collective."""
    if rollout.placed != "colocated" or nodes == 1:
        return (0,) * layout.world_size
    by_size = layout.world_rank // number("LOCAL_WORLD_SIZE", 1)
    return tuple(layout.all_gather_objects(int(ENVIRONMENT.get("GROUP_RANK", by_size))))


def launch_on_each_node(
    config: RunConfig,
    model_folder: Path,
    run_folder: Path,
    dtype: str,
    layout: Layout,
    of_ranks: tuple[int, ...],
    token: str | None,
) -> NodeServers:
    """Build each node's launcher on its first rank, without starting it. Collective. Raises ValueError or RankError."""
    nodes, node = sorted(set(of_ranks)), of_ranks[layout.world_rank]
    share, rest = divmod(config.rollout.servers, len(nodes))
    if rest or not share:
        raise ValueError(
            f"rollout.servers: {config.rollout.servers} is not a multiple of the run's {len(nodes)} nodes; use a "
            "multiple"
        )
    token = on_first_rank(layout, lambda: token or secrets.token_urlsafe(32))

    def build() -> Launcher | None:
        if of_ranks.index(node) != layout.world_rank:
            return None
        fields: dict[str, Any] = dict(
            host=_own_host(config.rollout.interface), num_servers=share, first=share * nodes.index(node)
        )
        folders = model_folder, run_folder
        return make_launcher(config, *folders, dtype, num_ranks=of_ranks.count(node), token=token, **fields)

    launcher = run_own_and_agree(layout, build)
    return NodeServers(of_ranks, launcher, token)


def _own_host(interface: str) -> str:
    """Return this node's address for servers: of `rollout.interface`, or by default on the route to the first node."""
    if interface != LOOPBACK:
        return address_of(interface)
    return own_address(f"http://{ENVIRONMENT['MASTER_ADDR']}:{ENVIRONMENT['MASTER_PORT']}")


def await_all(
    servers: NodeServers, rollout: RolloutSection, layout: Layout, say: Callable[[str], None], resources: ExitStack
) -> tuple[Nodes, NodeLaunchers | None, list[str]]:
    """Wait for the servers of every node. Return the nodes with their servers, rank 0's view of all launchers (None on
    other ranks), and the servers' URLs. Collective. Raises EngineStartError, WeightSyncError when a node cannot reach
    rank 0's store, or RankError."""
    launcher, of_ranks = servers.launcher, servers.of_ranks
    everyone = run_and_agree(layout, lambda: launcher.wait(say) if launcher else [])
    by_node = {node: everyone[of_ranks.index(node)] for node in sorted(set(of_ranks))}
    nodes = Nodes(of_ranks, {url: node for node, urls in by_node.items() for url in urls})
    first, seconds = layout.world_rank == 0, rollout.startup_timeout
    secret = on_first_rank(layout, lambda: secrets.token_hex(32))
    arguments = 0, Deadline(seconds), secret
    store = run_own_and_agree(
        layout, lambda: Store(_own_host(rollout.interface), *arguments, serve=True) if first else None
    )
    address = on_first_rank(layout, lambda: (store.host, store.port) if store else ("", 0))

    def start_agent() -> None:
        if launcher is not None and not first:
            agent = NodeAgent(of_ranks[layout.world_rank], launcher, Store(*address, Deadline(seconds), secret))
            resources.enter_context(agent)

    run_own_and_agree(layout, start_agent)  # every agent has published its servers
    all_launchers = None
    if store is not None and launcher is not None:
        others = [node for node in by_node if node != of_ranks[0]]
        all_launchers = NodeLaunchers(launcher, store, others, len(by_node[of_ranks[0]]))
    return nodes, all_launchers, [url for urls in by_node.values() for url in urls]
