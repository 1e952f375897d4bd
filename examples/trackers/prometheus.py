"""Serves the latest metrics to Prometheus on the loopback interface, with those of the run's vLLM servers.

    run:
      trackers: [tensorboard, examples/trackers/prometheus.py:PrometheusSink]

The variable PROMETHEUS_PORT has the port, 9400 by default; 0 is any free one. Needs prometheus_client, which comes with
vLLM.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.loopback import LOOPBACK_ADDRESS
from megagrpo.records.sinks.sink import ServerMetrics, TrackedRun, TrackerSink

if TYPE_CHECKING:
    from aiohttp import web
    from prometheus_client.core import Metric

COUNTED = {"num_tokens": "megagrpo_trained_tokens", "num_generated_tokens": "megagrpo_generated_tokens"}
_SERVER = re.compile(r"/servers/([0-9]{1,4})/metrics")
_ODD = re.compile(r"\W", re.ASCII)
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")  # a web page reaches this port under a name of its own
SECONDS = 30.0  # of a connection, whatever it sends
MAX_CONNECTIONS = 32  # one more closes the oldest
MIN_KEY = 16  # characters


class PrometheusSink(TrackerSink):
    """Answers `/metrics` (the trainer), `/servers/N/metrics` (vLLM server N, for requests with the key) and `/targets`,
    the list of both for `http_sd_configs`. In the run's folder, `prometheus_url` has the address and `prometheus_key`
    the key."""

    def __init__(self, run: TrackedRun):
        from prometheus_client import CollectorRegistry  # slow to import

        super().__init__(run)
        self._name = run.name
        self._servers: ServerMetrics | None = None
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}  # by name in metrics.jsonl
        self._counts = dict.fromkeys(["megagrpo_steps", *COUNTED.values()], 0.0)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._key = _key(run.folder / "prometheus_key")
        listener = socket.create_server((LOOPBACK_ADDRESS, int(os.environ.get("PROMETHEUS_PORT", "9400"))))
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        serve = self._serve(listener)
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(serve), name="prometheus", daemon=True
        )
        self._thread.start()
        (run.folder / "prometheus_url").write_text(f"http://{LOOPBACK_ADDRESS}:{listener.getsockname()[1]}\n")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            self._values |= metrics | {"step": float(step), "last_step_timestamp_seconds": time.time()}
            self._counts["megagrpo_steps"] += 1
            for name, counter in COUNTED.items():
                self._counts[counter] += metrics.get(name, 0.0)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            self._values |= metrics

    def follow(self, servers: ServerMetrics) -> None:
        """Serve the metrics of these vLLM servers too."""
        self._servers = servers

    def close(self, failed: bool = False) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(SECONDS)

    async def _serve(self, listener: socket.socket) -> None:
        from aiohttp import web

        logger = logging.getLogger("megagrpo.prometheus")
        logger.disabled = True  # a broken request is no event of the run
        server = web.Server(self._answer, logger=logger, access_log=None, lingering_time=0)
        recent: deque[web.RequestHandler] = deque(maxlen=MAX_CONNECTIONS)

        def connection() -> web.RequestHandler:
            if len(recent) == MAX_CONNECTIONS:
                recent[0].force_close()
            recent.append(server())
            self._loop.call_later(SECONDS, recent[-1].force_close)
            return recent[-1]

        opened = await self._loop.create_server(connection, sock=listener)
        await self._closing.wait()
        opened.close()
        await server.shutdown(1.0)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        status, kind, body = 405, "text/plain", b"only GET\n"
        if not _HOST.fullmatch(request.host):
            status, body = 421, b"this address is 127.0.0.1 or localhost\n"
        elif request.method in ("GET", "HEAD"):
            sent = request.headers.get("Authorization", "").encode()
            has_key = hmac.compare_digest(sent, f"Bearer {self._key}".encode())
            accept = request.headers.get("Accept", "")
            status, kind, body = await asyncio.to_thread(self.page, request.path, request.host, accept, has_key)
        return web.Response(status=status, body=body, headers={"Content-Type": kind})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: the interface of a collector of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values, counts = dict(self._values), dict(self._counts)
        families: dict[str, dict[str, float]] = defaultdict(dict)
        for name, value in values.items():
            families[metric_name(name)][name] = value
        for family, members in families.items():
            gauge = GaugeMetricFamily(family, f"{', '.join(members)} of metrics.jsonl", labels=("run", "metric"))
            for name, value in members.items():
                gauge.add_metric((self._name, name), value)
            yield gauge
        for name, value in counts.items():
            counter = CounterMetricFamily(name, "Sum since this process started", labels=("run",))
            counter.add_metric((self._name,), value)
            yield counter

    def page(self, path: str, host: str, accept: str, has_key: bool) -> tuple[int, str, bytes]:
        """Return status, content type and body of the answer to a request at `host`."""
        from prometheus_client.exposition import choose_encoder

        urls = [] if self._servers is None else list(self._servers.urls)
        if path == "/metrics":
            encode, kind = choose_encoder(accept)
            return 200, kind, encode(self.registry)
        if path == "/targets":
            pages = [("/metrics", "trainer"), *((f"/servers/{i}/metrics", url) for i, url in enumerate(urls))]
            labels = [{"__metrics_path__": page, "run": self._name, "server": server} for page, server in pages]
            targets = [{"targets": [host], "labels": of_page} for of_page in labels]
            return 200, "application/json", json.dumps(targets).encode()
        match = _SERVER.fullmatch(path)
        if match and not has_key:
            return 401, "text/plain", b"needs the key in the file prometheus_key of the run's folder\n"
        if match and self._servers is not None and int(match[1]) < len(urls):
            try:
                return 200, "text/plain; version=0.0.4; charset=utf-8", self._servers.metrics(urls[int(match[1])])
            except Exception as error:  # errors of the HTTP client; the server may sleep or restart
                return 502, "text/plain", f"{urls[int(match[1])]}: {error}\n".encode()
        return 404, "text/plain", b"no such page; there are /metrics, /targets and /servers/N/metrics\n"


def _key(file: Path) -> str:
    """Return the key in `file`, which is created for this user only. A file that exists keeps its rights."""
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(secrets.token_urlsafe(24))
    except FileExistsError:
        pass
    key = file.read_text().strip()
    if len(key) < MIN_KEY:
        raise ValueError(f"{file} has no key of {MIN_KEY} or more characters; remove the file")
    return key


def metric_name(name: str) -> str:
    """Return the name of a metric in Prometheus: `eval/pass@1` is `megagrpo_eval_pass_at_1`."""
    return "megagrpo_" + _ODD.sub("_", name.replace("@", "_at_"))
