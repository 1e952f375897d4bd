"""Serves the latest metrics to Prometheus on the loopback interface, with those of the run's vLLM servers.

    run:
      trackers: [tensorboard, examples/trackers/prometheus.py:PrometheusSink]

The variable PROMETHEUS_PORT has the port, 9400 by default; 0 is any free one. Needs prometheus_client, which comes with
vLLM.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from megagrpo.loopback import LOOPBACK_ADDRESS
from megagrpo.records.sinks.sink import ServerMetrics, TrackedRun, TrackerSink

if TYPE_CHECKING:
    from prometheus_client.core import Metric

COUNTED = {"num_tokens": "megagrpo_trained_tokens", "num_generated_tokens": "megagrpo_generated_tokens"}
_SERVER = re.compile(r"/servers/(\d+)/metrics")
_ODD = re.compile(r"\W", re.ASCII)


class PrometheusSink(TrackerSink):
    """Answers `/metrics` (the trainer), `/servers/N/metrics` (vLLM server N, with the run's token) and `/targets`, the
    list of both for `http_sd_configs`. The file `prometheus_url` in the run's folder has the address."""

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
        self._server = _Server((LOOPBACK_ADDRESS, int(os.environ.get("PROMETHEUS_PORT", "9400"))), _Handler)
        self._server.sink = self
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "prometheus_url").write_text(f"http://{LOOPBACK_ADDRESS}:{self._server.server_port}\n")

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
        self._server.shutdown()
        self._server.server_close()

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

    def page(self, path: str, host: str, accept: str) -> tuple[int, str, bytes]:
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
        if match and self._servers is not None and int(match[1]) < len(urls):
            try:
                return 200, "text/plain; version=0.0.4; charset=utf-8", self._servers.metrics(urls[int(match[1])])
            except Exception as error:  # errors of the HTTP client; the server may sleep or restart
                return 502, "text/plain", f"{urls[int(match[1])]}: {error}\n".encode()
        return 404, "text/plain", b"no such page; there are /metrics, /targets and /servers/N/metrics\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    sink: PrometheusSink


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        path, host = self.path.partition("?")[0], self.headers.get("Host", "")
        status, kind, body = server.sink.page(path, host, self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def metric_name(name: str) -> str:
    """Return the name of a metric in Prometheus: `eval/pass@1` is `megagrpo_eval_pass_at_1`."""
    return "megagrpo_" + _ODD.sub("_", name.replace("@", "_at_"))
