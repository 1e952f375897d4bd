"""Runs the servers of a config on this machine, for a trainer on other machines: `megagrpo serve`."""

from __future__ import annotations

import signal
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

from megagrpo.config import RunConfig
from megagrpo.engine.http.protocol import EngineStartError
from megagrpo.engine.servers.followers import FOLLOW_SECONDS, Followers, Reports
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerNode
from megagrpo.engine.servers.restarts import HangDetector
from megagrpo.engine.servers.serve_inputs import Place, node_name, report_start
from megagrpo.engine.servers.serving import engine_dtype, make_launcher
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform.device import quiet
from megagrpo.platform.process.terminal import show, warn
from megagrpo.platform.rendezvous.store_exchange import Deadline, own_address
from megagrpo.types import WeightSyncError

SERVE_LOOP_SECONDS = 0.5  # between two looks at the servers


def serve(
    config: RunConfig, urls: Path | None, logs: Path, reach: str | None, first_gpu: int, token: str, place: Place | None
) -> int:
    """Start `rollout.servers` servers on the GPUs from `first_gpu` and keep them running until SIGTERM or Ctrl-C. With
    `place` start this node's part of one server on several nodes.

    Returns 0 after a signal, and 1 when every server has exceeded `rollout.max_restarts`, or a node of the server is
    lost, so that the caller can restart the command.

    The servers listen on this machine's address on the route to `reach`, by default on `rollout.interface`. They accept
    only requests with `token`. Once all are healthy, the file NODE.url in the folder `urls` holds one line per
    server. Logs go to a subfolder with this machine's name in `logs`.

    Raises ValueError or OSError when a server does not start.
    """
    quiet()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    name, fields = node_name(), dict[str, Any]()
    try:
        if place is not None:
            node = this_node(place, config.rollout.startup_timeout, stop)
            fields = dict(node=node, host=node.address, num_servers=1)
            if node.index > 0:
                return _follow(_launcher(config, logs / name, token, **fields), node, place.port, name, stop)
            fields["followers"] = Followers(node.first, place.port, token, config.rollout.nodes_per_server)
        if reach:
            fields["host"] = own_address(f"http://{reach}")
        with _launcher(config, logs / name, token, num_ranks=first_gpu, **fields) as launcher:
            launcher.start()
            addresses = launcher.wait(partial(_progress, name, stop))
            show(f"{name}: {', '.join(addresses)}")
            if urls is not None:
                report_start(urls, "url", "".join(f"{url}\n" for url in addresses))
            return 0 if _watch(launcher, stop, config.rollout.weight_sync_timeout) else 1
    except (EngineStartError, WeightSyncError) as error:
        raise ValueError(str(error)) from error


def this_node(place: Place, seconds: float, stop: threading.Event) -> ServerNode:
    """Return this node of its server. Raises ValueError when the first node's host is unknown for so many seconds."""
    first = _address(place.host, Deadline(seconds), stop)
    return ServerNode(place.index, own_address(f"http://{first}") if place.index else first, first)


def _address(host: str, deadline: Deadline, stop: threading.Event) -> str:
    """Return the address of a host. A host that starts later may be unknown for a while."""
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if deadline.passed or stop.is_set():
                raise ValueError(f"--head: {host} is unknown ({error}); correct the name") from error
        stop.wait(SERVE_LOOP_SECONDS)


def _follow(launcher: Launcher, node: ServerNode, port: int, name: str, stop: threading.Event) -> int:
    """Run this node's part at every start of the server. Returns 0 after a signal, 1 when the first node has ended."""
    token, seconds = launcher.token or "", launcher.startup_timeout
    try:
        with launcher, Reports(node.first, port, token, node.index, name, seconds, stop) as reports:
            show(f"{name}: node {node.index} of the server on {node.first}")
            while not stop.wait(FOLLOW_SECONDS):
                if (ports := reports.order()) is not None:
                    launcher.start_part(ports)
                part = next(iter(launcher.servers), None)
                if part is None or part.alive:
                    reports.put()
                else:
                    reports.put(exit=part.exit_description, cause=part.cause(), killed=part.killed, log=str(part.log))
    except WeightSyncError as error:
        if not stop.is_set():
            _warn(f"the server's first node {node.first}:{port} has ended or has another token: {error}")
            return 1
    return 0


def _progress(node: str, stop: threading.Event, text: str) -> None:
    if stop.is_set():
        raise SystemExit(0)
    show(f"{node}: {text}")


def _launcher(config: RunConfig, logs: Path, token: str, **fields: Any) -> Launcher:
    model = resolve_model(config.model.path)
    dtype = engine_dtype(config.rollout.quantization, config.model.precision)
    return make_launcher(config, model, logs, dtype, token=token, **fields)


def _watch(launcher: Launcher, stop: threading.Event, engine_seconds: float) -> bool:
    """Restart servers that died, as often as the launcher allows, and kill those that `HangDetector` reports as hung.

    Returns True when asked to stop, False when the last server is gone for good. A restarted server has its initial
    weights; the trainer sends it the current ones before the first request.
    """
    gone: set[str] = set()
    hang_detector = HangDetector(launcher, engine_seconds)
    while not stop.wait(SERVE_LOOP_SECONDS):
        hang_detector.end_hung(_warn)
        launcher.end_incomplete()
        for index, server in enumerate(launcher.servers):
            if server.alive or server.url in gone:
                continue
            if launcher.may_restart(server.url):
                _warn(launcher.restart(index))
            else:
                gone.add(server.url)
                limit = f"restart limit {launcher.restarts[server.url]} reached (rollout.max_restarts)"
                if launcher.followers is not None and launcher.followers.lost:
                    limit = "it cannot restart without this node"
                _warn(f"vLLM server {server.url} {server.exit_description}; {limit}; log: {server.log}")
        if len(gone) == len(launcher.servers):
            return False
    return True


def _warn(text: str) -> None:
    warn(f"warning: {text}")
