"""The example tracker of Prometheus: its pages, read with the parser of prometheus_client."""

import contextlib
import json
import socket
import stat
import struct
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from megagrpo.config import load_config
from megagrpo.platform.process import user_code
from megagrpo.records.writer import MetricsWriter
from tests.unit.records.sinks.tracked import CONFIG

FILE = Path(__file__).parents[4] / "examples" / "trackers" / "prometheus.py"
TRACKERS = f"run.trackers=[{FILE}:PrometheusSink]"


class Servers:
    urls = ("http://a:1", "http://b:2")

    def metrics(self, url):
        if url == self.urls[1]:
            raise OSError("asleep")
        return b"vllm:num_requests_running 3\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A writer with the tracker on a free port, and its address."""
    monkeypatch.setenv("PROMETHEUS_PORT", "0")
    config = load_config(CONFIG, [TRACKERS, "run.name=sums"])
    with MetricsWriter(tmp_path, config, restored_step=3) as writer:
        yield writer, (tmp_path / "prometheus_url").read_text().strip()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def samples(text, parse=plain):
    return {
        (sample.name, sample.labels.get("metric")): (sample.value, sample.labels["run"], family.type)
        for family in parse(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_latest_metrics_as_gauges_and_sums_as_counters(run):
    writer, url = run
    assert samples(get(f"{url}/metrics")[1])["megagrpo_steps_total", None] == (0, "sums", "counter")
    writer.evaluation(3, {"pass@4": 0.5})
    writer.step(4, {"reward": 0.25, "rewards/a-b/mean": 1.0, "rewards/a_b/mean": 2.0, "num_generated_tokens": 10.0})
    writer.step(5, {"reward": 0.5, "kl": float("nan"), "num_generated_tokens": 7.0, "num_tokens": 9.0})
    kind, text = get(f"{url}/metrics")
    found = samples(text)
    assert kind.startswith("text/plain") and found["megagrpo_reward", "reward"] == (0.5, "sums", "gauge")
    assert found["megagrpo_eval_pass_at_4", "eval/pass@4"][0] == 0.5 and found["megagrpo_step", "step"][0] == 5
    both = "megagrpo_rewards_a_b_mean"  # two metrics whose names differ in a character that Prometheus lacks
    assert [found[both, f"rewards/a{odd}b/mean"][0] for odd in "-_"] == [1, 2]
    assert found["megagrpo_steps_total", None] == (2, "sums", "counter")
    assert (
        found["megagrpo_generated_tokens_total", None][0] == 17 and found["megagrpo_trained_tokens_total", None][0] == 9
    )
    kind, text = get(f"{url}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert samples(text, openmetrics)["megagrpo_reward", "reward"] == (0.5, "sums", "gauge")


def test_one_list_of_targets_finds_trainer_and_servers(run, tmp_path):
    (writer, url), folder = run, tmp_path
    writer.follow(Servers())
    kind, text = get(f"{url}/targets")
    pages = {
        (one["targets"][0], one["labels"]["__metrics_path__"]): one["labels"]["server"] for one in json.loads(text)
    }
    host = url.removeprefix("http://")
    assert kind == "application/json" and pages == {
        (host, "/metrics"): "trainer",
        (host, "/servers/0/metrics"): "http://a:1",
        (host, "/servers/1/metrics"): "http://b:2",
    }
    key = {"Authorization": f"Bearer {(folder / 'prometheus_key').read_text()}"}
    assert stat.S_IMODE((folder / "prometheus_key").stat().st_mode) == 0o600
    kind, text = get(f"{url}/servers/0/metrics", **key)
    assert [(s.name, s.value) for f in plain(text) for s in f.samples] == [("vllm:num_requests_running", 3)]
    for page, status in (("/servers/1/metrics", 502), ("/servers/2/metrics", 404), ("/", 404)):
        assert refused(url + page, **key) == status
    for wrong in ({}, {"Authorization": "Bearer "}, {"Authorization": key["Authorization"][:-1]}):
        assert refused(f"{url}/servers/0/metrics", **wrong) == 401


def refused(url, **headers):
    """The status of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(url, **headers)
    return raised.value.code


def test_odd_requests_get_an_answer_and_print_nothing(run, capfd, caplog):
    _, url = run
    digits = ("9" * 5000, "99999", "\u0663", "-1", "0x1", "")
    for path in (*(f"/servers/{quote(n)}/metrics" for n in digits), "/metrics/", "//metrics", "/%00", "/" + "a" * 6000):
        assert refused(url + path) == 404, path
    for host in ("evil.example", "127.0.0.1.evil.example:9400", "localhost:9400@evil.example", "127.0.0.1:"):
        assert [refused(url + path, Host=host) for path in ("/metrics", "/targets")] == [421, 421], host
    assert "megagrpo_steps" in get(f"{url}/metrics", Host="localhost:1")[1]  # through ssh -L
    for line in (
        b"POST /metrics HTTP/1.1",
        b"GET * HTTP/1.1",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1",
        b"\x16\x03",
        b"GET",
    ):
        with socket.create_connection(url.removeprefix("http://").split(":"), timeout=10) as client:
            client.sendall(line + b"\r\nHost: 127.0.0.1\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1."), line
    for _ in range(20):  # clients that leave in the middle of the answer
        with socket.create_connection(url.removeprefix("http://").split(":")) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert "megagrpo_steps" in get(f"{url}/metrics")[1]
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_half_requests_take_neither_threads_nor_the_page(run, monkeypatch):
    _, url = run
    monkeypatch.setattr(sys.modules[user_code.load_file(FILE).__name__], "SECONDS", 0.5)
    before, clients = threading.active_count(), []
    for _ in range(200):
        clients.append(socket.create_connection(url.removeprefix("http://").split(":"), timeout=10))
        clients[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.")
    assert "megagrpo_steps" in get(f"{url}/metrics")[1] and threading.active_count() <= before + 2
    for client in clients:  # each is closed: the oldest by newer ones, the others after SECONDS
        with client, contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""


def test_only_the_loopback_interface_answers_and_only_until_the_end(run):
    writer, url = run
    assert url.startswith("http://127.0.0.1:")
    sockets = [line.split()[1] for line in open("/proc/net/tcp") if line.split()[3] == "0A"]
    port = f"{int(url.rpartition(':')[2]):04X}"
    assert [address for address in sockets if address.endswith(f":{port}")] == [f"0100007F:{port}"]
    writer.close()
    with pytest.raises(urllib.error.URLError):
        get(f"{url}/metrics")


def test_a_port_that_is_taken_costs_the_tracker_not_the_run(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_PORT", run[1].rpartition(":")[2])
    config = load_config(CONFIG, [TRACKERS])
    with MetricsWriter(tmp_path / "other", config) as writer:
        writer.step(1, {"reward": 0.5})
    assert "PrometheusSink failed and may be incomplete; training continues. OSError:" in capsys.readouterr().err


def test_names_have_only_characters_of_prometheus():
    assert user_code.load_file(FILE).metric_name("time/a.b:c é") == "megagrpo_time_a_b_c__"
