"""Runs the servers of a config on this machine, for a trainer on other machines: `megagrpo serve`."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from megagrpo.config import ConfigError, RunConfig
from megagrpo.device import quiet
from megagrpo.engine.access import read_token
from megagrpo.engine.protocol import EngineStartError
from megagrpo.families.sources import resolve_model
from megagrpo.process.terminal import show, warn
from megagrpo.servers.hang_detection import HangDetector
from megagrpo.servers.launcher import Launcher
from megagrpo.servers.serving import engine_dtype, make_launcher
from megagrpo.transfer.exchange import own_address

SERVE_LOOP_SECONDS = 0.5  # between two looks at the servers


def serve(config: RunConfig, urls: Path | None, logs: Path, reach: str | None, first_gpu: int) -> int:
    """Start `rollout.servers` servers on the GPUs from `first_gpu` and keep them running until SIGTERM or Ctrl-C.

    Returns 0 after a signal, and 1 when every server has exceeded `rollout.max_restarts`, so that the caller can restart the command.

    The servers listen on this machine's address on the route to `reach`, by default on `rollout.interface`. They accept only requests
    with the token of `rollout.token_file` or the environment. Once all are healthy, the file NODE.url in the folder `urls` holds one
    line per server. Logs go to a subfolder with this machine's name in `logs`.

    Raises ConfigError, and writes a file NODE.failed, when a server does not start or there is no token.
    """
    quiet()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        with _launcher(config, logs / node, reach, first_gpu) as launcher:
            launcher.start()
            addresses = launcher.wait(partial(_progress, node, stop))
            show(f"{node}: {', '.join(addresses)}")
            if urls is not None:
                write(urls, f"{node}.url", "".join(f"{url}\n" for url in addresses))
            return 0 if _watch(launcher, stop, config.rollout.weight_sync_timeout) else 1
    except (ValueError, OSError, EngineStartError) as error:
        if urls is not None:
            with suppress(OSError):
                write(urls, f"{node}.failed", f"{error}\n")
        raise ConfigError(str(error)) from error


def _progress(node: str, stop: threading.Event, text: str) -> None:
    if stop.is_set():
        raise SystemExit(0)
    show(f"{node}: {text}")


def write(folder: Path, name: str, text: str) -> None:
    """Write a file that is complete or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{name}"
    unfinished.write_text(text)
    unfinished.rename(folder / name)


def _launcher(config: RunConfig, logs: Path, reach: str | None, first_gpu: int) -> Launcher:
    token = read_token(config.rollout.token_file)
    if token is None:
        raise ValueError("rollout.token_file: servers for a remote trainer need its token; `openssl rand -hex 32` makes one")
    model = resolve_model(config.model.path)
    return make_launcher(
        config, model, logs, engine_dtype(config), num_ranks=first_gpu, host=reach and own_address(f"http://{reach}"), token=token
    )


def _watch(launcher: Launcher, stop: threading.Event, engine_seconds: float) -> bool:
    """Restart servers that died, as often as the launcher allows, and kill those that `HangDetector` reports as hung.

    Returns True when asked to stop, False when the last server is gone for good. A restarted server has its initial weights; the trainer
    sends it the current ones before the first request.
    """
    gone: set[str] = set()
    hang_detector = HangDetector(launcher, engine_seconds)
    while not stop.wait(SERVE_LOOP_SECONDS):
        hang_detector.end_hung(_warn)
        for index, server in enumerate(launcher.servers):
            if server.alive or server.url in gone:
                continue
            if launcher.may_restart(server):
                _warn(launcher.restart(index))
            else:
                gone.add(server.url)
                limit = f"restart limit {launcher.restarts[server.url]} reached (rollout.max_restarts)"
                _warn(f"vLLM server {server.url} {server.exit_description}; {limit}; log: {server.log}")
        if len(gone) == len(launcher.servers):
            return False
    return True


def _warn(text: str) -> None:
    warn(f"warning: {text}")
