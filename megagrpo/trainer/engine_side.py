"""The engine's side of a run: the vLLM servers that it starts or uses, their client, and the weight sync to them."""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megagrpo.config import ConfigError, RolloutSection, RunConfig, weight_path
from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.access import address_of
from megagrpo.engine.http.connections import MovedServers
from megagrpo.engine.http.probe import check_plugin, check_tool_parser
from megagrpo.engine.http.protocol import EngineStartError
from megagrpo.engine.http.server_calls import check_urls, named_urls
from megagrpo.engine.server_slots import Slots
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.node_agent import NodeAgent, NodeLaunchers
from megagrpo.engine.servers.restarts import Reconnector, Restarter
from megagrpo.engine.servers.serving import engine_dtype, make_launcher, servers_sleep
from megagrpo.loopback import LOOPBACK
from megagrpo.platform import device
from megagrpo.platform.parallel.agree import RankError, on_first_rank, run_and_agree, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.access_token import read_token
from megagrpo.platform.process.open_files import raise_open_files
from megagrpo.platform.process.progress_hook import Progress
from megagrpo.platform.process.variables import ENVIRONMENT, number
from megagrpo.platform.rendezvous.store_exchange import Deadline, Store, is_here, own_address
from megagrpo.sync.trainer_side.adapter_sync import AdapterSync, BaseSync
from megagrpo.sync.trainer_side.node_shares import Nodes
from megagrpo.sync.trainer_side.sync import Weights, WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings, transport_class
from megagrpo.trainer.gpu.gpu_sharing import start_asleep
from megagrpo.types import WeightSyncError


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Convert ValueError, RankError, EngineStartError and WeightSyncError raised inside to ConfigError: the user can
    fix the cause. A RankError becomes the text of the failed rank, so that a launcher's ranks print it once."""
    try:
        yield
    except (ValueError, RankError, EngineStartError, WeightSyncError) as error:
        raise ConfigError(error.problem if isinstance(error, RankError) else str(error)) from error


class NamedServers(NamedTuple):
    """The servers of `rollout.urls`, if any, and the token of all servers; None generates one."""

    token: str | None
    urls: list[str]


@dataclass(frozen=True)
class Servers:
    """The servers of a run: `named` by `rollout.urls` (no launcher), or started here (`launcher`, on rank 0; no URLs),
    or on every node of the ranks (`on_nodes`; `launcher` on the first rank of each)."""

    named: NamedServers
    moved: MovedServers | None
    launcher: Launcher | None
    sleep: bool  # they release their GPU memory while the policy trains
    dtype: str  # vLLM's name of their compute dtype, which is also the dtype of synced weights
    on_nodes: NodeServers | None = None


def check_servers(config: RunConfig) -> NamedServers:
    """Check the servers of `rollout.urls`, or of the file that replaces it, and return their token and URLs. Raises
    ValueError when a server does not respond, or cannot take weights or parse tool calls."""
    rollout = config.rollout
    if not config.generates:
        return NamedServers(None, [])
    token = read_token(rollout.token_file)
    urls = named_urls(rollout.urls, rollout.urls_file)
    check_urls(urls)
    if config.syncs_weights:
        check_plugin(urls, token, rollout.quantization)
    check_tool_parser(urls, config.multi_turn.vllm_parser, token)
    return NamedServers(token, urls)


@as_config_errors()
def start_servers(
    config: RunConfig,
    model_folder: Path,
    run_folder: Path,
    layout: Layout,
    named: NamedServers,
    progress: Progress,
    say: Callable[[str], None],
    resources: ExitStack,
) -> Servers:
    """Start the run's servers, unless `rollout.urls` names them. Servers that share the trainer's GPUs are awaited and
    put to sleep, others load while the policy builds. Collective. Raises ConfigError when they cannot start."""
    launcher, first, on_nodes = None, layout.world_rank == 0, None
    moved = None if config.rollout.urls else MovedServers(run_folder / "moved_servers.json")
    sleep = servers_sleep(config.rollout)
    dtype = engine_dtype(config.rollout.quantization, config.model.precision)
    if not config.generates:
        return Servers(named, moved=None, launcher=None, sleep=False, dtype=dtype)
    of_ranks = node_of_each_rank(config.rollout, config.run.nodes, layout)
    if len(set(of_ranks)) > 1:
        on_nodes = launch_on_each_node(config, model_folder, run_folder, dtype, layout, of_ranks, named.token)
        launcher, moved = on_nodes.launcher, None  # with several nodes a restarted server keeps its port
    elif first and not config.rollout.urls:
        num_ranks = number("LOCAL_WORLD_SIZE", 1)
        launcher = make_launcher(
            config, model_folder, run_folder, dtype, num_ranks=num_ranks, token=named.token, moved=moved
        )
    if launcher is not None:
        launcher.progress = progress
        resources.callback(launcher.stop)
    run_own_and_agree(layout, launcher.start if launcher else lambda: None)
    if sleep:  # vLLM measures free GPU memory as it starts, and would count the trainer's allocations as its own
        limits = config.leaves_weights, config.rollout.weight_sync_timeout
        run_own_and_agree(layout, lambda: start_asleep(launcher, *limits, say) if launcher else None)
    return Servers(named, moved, launcher, sleep, dtype, on_nodes)


def connect(
    servers: Servers,
    config: RunConfig,
    layout: Layout,
    tokenizer: Tokenizer | None,
    routes: RouteShape | None,
    base: Callable[[], Weights],
    say: Callable[[str], None],
    resources: ExitStack,
) -> tuple[VllmEngine | None, WeightSync | None]:
    """Wait for the servers and return this rank's client, None without a `tokenizer`, and the weight sync. Both are
    None in a run that does not generate. Collective. With `routes` the client's rollouts have the experts of their
    tokens. `base` gives the weights below adapters.

    Servers that end are restarted or brought back until `resources` closes. Raises ConfigError for unreachable servers.
    """
    if not config.generates:
        return None, None
    launcher, first, nodes = servers.launcher, layout.world_rank == 0, None
    launched: Launcher | NodeLaunchers | None = launcher
    if servers.on_nodes is not None:
        with as_config_errors():
            nodes, launched, urls = await_all(servers.on_nodes, config.rollout, layout, say, resources)
        token: str | None = servers.on_nodes.token
    else:
        wait = partial(launcher.wait, say) if launcher else lambda: servers.named.urls
        with as_config_errors():
            urls, token = on_first_rank(layout, lambda: (wait(), launcher.token if launcher else servers.named.token))
    with as_config_errors():
        transport, reason = choose_transport(config, layout, urls, nodes)
        refills = transport_class(transport).refills
    quantization = config.rollout.quantization
    quantized = f"; vLLM quantizes to {quantization}" if quantization != "none" else ""
    say(f"weight sync: {transport} ({reason}){quantized}")
    engine = None
    if tokenizer is not None:
        with as_config_errors():
            group = max(config.group_sizes.values())
            raise_open_files(requests_at_once(config.rollout, group, len(urls), layout.dp_size))
        options = engine_options(config, layout, launched) | dict(token=token, refills=refills, routes=routes)
        engine = VllmEngine(urls, tokenizer.decode, moved=servers.moved, sleeps=servers.sleep, **options)
        if engine.sleeps:
            engine.fleet.begin_sleep()
    with as_config_errors():
        driver = engine if first else None
        weight_sync = make_weight_sync(config, driver, layout, servers.dtype, transport, base, say, nodes)
    resources.enter_context(weight_sync)
    if launched is not None and launched.max_restarts and engine is not None:
        resources.enter_context(Restarter(launched, engine, weight_sync.load_last, say))
    elif first and config.rollout.urls and engine is not None:
        resources.enter_context(Reconnector(engine, weight_sync.load_last, say))
    return engine, weight_sync


def engine_options(config: RunConfig, layout: Layout, launched: Launcher | NodeLaunchers | None) -> dict[str, Any]:
    """Return the options of a rank's client that config and layout decide. `launched` are servers that the run has
    started."""
    rollout = config.rollout
    return dict(
        copies=rollout.dp if launched is not None else 1,
        clients=layout.dp_size,
        client=layout.dp_rank,
        longest_first=rollout.scheduling == "longest_first",
        logs=launched.logs if launched else [],
        adapters=config.synced_adapters,
        towers=config.towers,
        in_flight=rollout.in_flight if rollout.max_staleness else None,
        keeps_images=launched is not None and config.data.images and rollout.dp == 1,
        **engine_limits(rollout),
    )


def engine_limits(rollout: RolloutSection) -> dict[str, Any]:
    """Return the engine's limits: concurrent sequences and timeouts. A restarting server gets a starting one's time."""
    patience = rollout.startup_timeout if rollout.max_restarts else 0.0
    if rollout.urls:
        patience = rollout.reconnect_timeout
    timeouts = dict(request_timeout=rollout.request_timeout, sync_timeout=rollout.weight_sync_timeout)
    urls_file = rollout.urls_file and Path(rollout.urls_file)
    return dict(max_num_seqs=rollout.max_num_seqs, patience=patience, urls_file=urls_file, **timeouts)


def requests_at_once(rollout: RolloutSection, group: int, servers: int, clients: int) -> int:
    """Return the most requests that one of `clients` ranks has in flight: its share of the steps that are generated at
    once, of groups of `group` responses, or what the servers take."""
    prompts = math.ceil(rollout.prompts_per_step / clients) * (1 + rollout.max_staleness)
    return min(prompts * group, servers * Slots(rollout.max_num_seqs).most)


def choose_transport(
    config: RunConfig, layout: Layout, urls: Sequence[str], nodes: Nodes | None = None
) -> tuple[str, str]:
    """Choose how weights get to all `urls`. `nodes` are the ranks' nodes if each has its own servers. Returns the
    transport and the reason. Raises ValueError when ranks on other hosts cannot reach the servers. Collective."""
    if nodes is not None:
        return weight_path(config, device.has_gpu(), one_host=False)
    hosts = layout.all_gather_objects((socket.gethostname(), all(map(is_here, urls))))
    names = sorted({name for name, _ in hosts})
    if len(names) > 1 and not config.rollout.urls and config.rollout.interface == LOOPBACK:
        raise ValueError(
            f"rollout.urls: ranks are on {', '.join(names)}, and servers started by this run answer on the first "
            "rank's host only; name an interface that all hosts reach (rollout.interface), or servers that run already"
        )
    return weight_path(config, device.has_gpu(), one_host=len(names) == 1 and all(here for _, here in hosts))


def make_weight_sync(
    config: RunConfig,
    engine: VllmEngine | None,
    layout: Layout,
    dtype: str,
    transport: str,
    base: Callable[[], Weights],
    say: Callable[[str], None],
    nodes: Nodes | None = None,
) -> WeightSync:
    """Build the run's weight sync over `transport`, for an engine that computes in `dtype`. `nodes` are the nodes of
    the ranks if each has its own servers. `base` gives the weights below adapters. Collective."""
    r, base_sync = config.rollout, None
    megabytes, relay = r.weight_sync_bucket_megabytes, r.weight_sync_relay
    if config.syncs_weights:
        settings = TransportSettings(device.device(), r.weight_sync_timeout, megabytes, nodes, relay)
        weight_sync = WeightSync(engine, layout, dtype, transport_class(transport)(layout, dtype, settings), say)
        if not config.lora.syncs_adapters:
            return weight_sync
        base_sync = BaseSync(weight_sync, base)
    here = is_here if r.nodes_per_server == 1 else lambda url: False
    return AdapterSync(engine, layout, dtype, config.lora, config.model.path, here, base_sync=base_sync)


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
