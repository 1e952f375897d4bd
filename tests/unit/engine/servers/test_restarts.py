"""The restarter around ordinary processes with a health check: the number of restarts, and when it stops restarting a
server."""

import os
import signal
import sys
import time

import psutil
import pytest

import megagrpo.engine.servers.restarts as restarts_module
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http import connections as http
from megagrpo.engine.http.fleet import State
from megagrpo.engine.http.protocol import EngineDeadError
from megagrpo.engine.servers import launcher as launcher_module
from megagrpo.engine.servers import restarts
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.node_agent import NodeAgent, NodeLaunchers
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.engine.servers.restarts import Restarter
from megagrpo.platform.rendezvous.store_exchange import Deadline, Store
from megagrpo.types import Prompt, SamplingParams, WeightSyncError
from tests.unit.waiting import wait_until

WELL = """
import http.server, sys
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"world_size": 2}'
        self.send_response(200)
        self.send_header("content-type", "application/json"); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Well).serve_forever()
"""


class Stand(Launcher):
    """Servers that only pass health checks; with a file `broken` in the log folder they exit at once."""

    def _command(self, port):
        code = f"import os, sys; os.path.exists({str(self.log_dir / 'broken')!r}) and sys.exit(3)\n{WELL}"
        return [sys.executable, "-I", "-S", "-c", code, str(port)]


class Wedged(Stand):
    """Servers that pass health checks; their engine does not respond while a file `wedged` is in the log folder."""

    def _command(self, port):
        *words, code, port = super()._command(port)
        silent = f"while os.path.exists({str(self.log_dir / 'wedged')!r}) and 'paused' in self.path: time.sleep(0.02)"
        code = code.replace("do_GET(self):", f"do_GET(self):\n        import time\n        {silent}")
        return [*words, code.replace("http.server.HTTPServer", "http.server.ThreadingHTTPServer"), port]


def stop(server):
    """Send SIGSTOP to a server, but not to its supervisor."""
    for process in psutil.Process(server.supervisor.pid).children(recursive=True):
        process.suspend()


def impatient(monkeypatch):
    """Treat a server as hung after half a second without a response."""
    for name, seconds in (("CHECK_SECONDS", 0.01), ("HANG_SECONDS", 0.5)):
        monkeypatch.setattr(restarts, name, seconds)
    for module in (restarts, http):
        monkeypatch.setattr(module, "HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(launcher_module, "SERVER_GRACE_SECONDS", 0.1)


@pytest.fixture
def stand(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts_module, "RESTART_LOOP_SECONDS", 0.05)
    monkeypatch.setattr(launcher_module, "SERVER_GRACE_SECONDS", 1.0)
    (tmp_path / "config.json").write_text("{}")
    with Stand(ServerOptions(str(tmp_path), "float32", 64), tmp_path, max_restarts=1) as launcher:
        launcher.start()
        launcher.wait()
        yield launcher


def kill(server):
    os.killpg(server.supervisor.pid, signal.SIGKILL)
    server.supervisor.wait()


def test_a_server_is_started_again_at_its_address_filled_and_then_alive(stand):
    engine, filled, said = VllmEngine(stand.urls, str, patience=5.0), [], []

    def refill(url):
        assert engine.fleet.state(url) is State.STARTING
        filled.append(url)
        return 0

    stand.max_restarts = 2
    with Restarter(stand, engine, refill, said.append):
        for time_ in (1, 2):
            kill(stand.servers[0])
            wait_until(lambda: len(said) == 2 * time_)  # noqa: B023
            assert filled == stand.urls * time_ and engine.fleet.serving() == stand.urls
    assert "was killed by SIGKILL; restarting it, 1 of 2 times (rollout.max_restarts); log: " in said[0]
    assert said[1].endswith("is back, with weight version 0")


def test_a_server_that_ends_again_and_again_is_given_up_and_the_engine_waits_no_longer(stand, tmp_path):
    engine, said = VllmEngine(stand.urls, str, patience=60.0), []
    (tmp_path / "broken").touch()
    stand.max_restarts = 2
    with Restarter(stand, engine, lambda url: 0, said.append):
        kill(stand.servers[0])
        with pytest.raises(EngineDeadError, match="no vLLM server responds any longer"):
            engine.generate([Prompt(0, (5, 6), "")], 1, SamplingParams(0.0, 4), seed=0)
    assert len(said) == 3 and "exit code 3; restart limit 2 reached (rollout.max_restarts)" in said[2]


def test_a_server_that_does_not_take_the_weights_is_ended(stand):
    engine, said = VllmEngine(stand.urls, str, patience=5.0), []

    def refill(url):
        raise WeightSyncError("phase update: worker 0: no")

    with Restarter(stand, engine, refill, said.append):
        kill(stand.servers[0])
        wait_until(lambda: len(said) == 3)
    assert (
        "did not load the current weights; killing it: phase update: worker 0: no" in said[1]
        and "restart limit 1 reached" in said[2]
    )
    assert engine.fleet.states() == {stand.urls[0]: State.GONE}


def test_a_server_that_cannot_be_filled_now_stays_out_until_the_next_sync(stand):
    engine, said = VllmEngine(stand.urls, str, patience=5.0), []
    with Restarter(stand, engine, lambda url: None, said.append):
        kill(stand.servers[0])
        wait_until(lambda: len(said) == 2)
        assert said[1].endswith("is back and waits for the next weight sync")
        assert engine.fleet.states() == {stand.urls[0]: State.NEEDS_WEIGHTS}
        assert engine.workers() == {stand.urls[0]: 2}  # the server takes part in the sync
        assert engine.fleet.serving() == []  # gets no requests before its weights


def test_a_server_that_is_there_and_says_nothing_is_ended_and_started_again(stand, monkeypatch):
    monkeypatch.setattr(restarts_module, "KILL_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(restarts_module, "healthy", lambda url: len(said) > 1)
    engine, said = VllmEngine(stand.urls, str, patience=5.0), []
    engine.fleet.silent(stand.urls[0])  # a request got no response
    with Restarter(stand, engine, lambda url: 0, said.append):
        wait_until(lambda: len(said) == 3)
    assert "no response for 0.2 s; killing it" in said[0] and "restarting it" in said[1] and "is back" in said[2]


@pytest.mark.parametrize("wedged", [False, True], ids=["stopped", "wedged"])
def test_an_idle_server_that_hangs_is_killed_and_restarted(wedged, tmp_path, monkeypatch):
    monkeypatch.setattr(restarts_module, "RESTART_LOOP_SECONDS", 0.05)
    impatient(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    with Wedged(ServerOptions(str(tmp_path), "float32", 64), tmp_path, max_restarts=1) as launcher:
        launcher.start()
        engine, said = VllmEngine(launcher.wait(), str, patience=5.0, sync_timeout=0.6 if wedged else 60.0), []
        with Restarter(launcher, engine, lambda url: 0, said.append):
            (tmp_path / "wedged").touch()
            if not wedged:
                time.sleep(1.0)  # an engine that loads weights does not respond either
                assert not said
                stop(launcher.servers[0])
            wait_until(lambda: launcher.restarts)
            (tmp_path / "wedged").unlink()
            wait_until(lambda: len(said) == 3)
    words = "is up, but its engine has not responded for 0.6 s" if wedged else "has not passed a health check for 0.5 s"
    assert words in said[0] and "restarting it, 1 of 1 times" in said[1] and "is back" in said[2]
    assert engine.fleet.serving() == engine.urls


def test_nothing_is_started_once_the_restarter_is_left(stand):
    engine = VllmEngine(stand.urls, str, patience=5.0)
    with Restarter(stand, engine, lambda url: 0, lambda line: None):
        pass
    kill(stand.servers[0])
    time.sleep(0.3)
    assert not stand.servers[0].alive and not stand.restarts


def test_a_server_that_ends_while_others_sleep_is_started_when_they_wake(stand):
    engine, said = VllmEngine(stand.urls, str, patience=5.0, sleeps=True), []
    engine.fleet.begin_sleep()
    with Restarter(stand, engine, lambda url: None, said.append):
        kill(stand.servers[0])
        wait_until(lambda: engine.fleet.state(stand.urls[0]) is State.ENDED)
        time.sleep(0.3)
        assert not stand.servers[0].alive and not said
        assert engine.workers() == {stand.urls[0]: 2}  # the only server: it is restarted, and takes part
    assert not engine.fleet.asleep and "restarting it" in said[0]


def test_a_server_that_starts_is_not_waited_for_at_the_end(stand, monkeypatch):
    monkeypatch.setattr(restarts_module, "healthy", lambda url: False)
    stand.max_restarts = 2
    engine, said, updates = VllmEngine(stand.urls, str, patience=5.0, sleeps=True), [], []
    monkeypatch.setattr(engine, "_update", lambda verbs: updates.append(stand.servers[0].alive))
    kill(stand.servers[0])
    with Restarter(stand, engine, lambda url: None, said.append):
        wait_until(lambda: said)
        engine.sleep(keeps_weights=True, last=True)
    assert updates == [False] and len(said) == 1


def test_who_has_servers_sleep_waits_for_one_that_starts_and_it_sleeps_too(stand, monkeypatch):
    engine, said, updates = VllmEngine(stand.urls, str, patience=5.0, sleeps=True), [], []
    monkeypatch.setattr(engine, "_update", lambda verbs: updates.append((engine.fleet.updatable(), list(said))))
    kill(stand.servers[0])
    with Restarter(stand, engine, lambda url: None, said.append):
        wait_until(lambda: said)
        engine.sleep()
    assert (
        len(updates) == 1
        and updates[0][0] == stand.urls
        and updates[0][1][-1].endswith("is back and waits for the next weight sync")
    )
    assert engine.fleet.states() == {stand.urls[0]: State.NEEDS_WEIGHTS}


def test_who_has_servers_sleep_waits_until_a_silent_one_has_ended(stand, monkeypatch):
    monkeypatch.setattr(restarts_module, "KILL_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(restarts_module, "healthy", lambda url: False)
    engine, said, updates = VllmEngine(stand.urls, str, patience=5.0, sleeps=True), [], []
    monkeypatch.setattr(engine, "_update", lambda verbs: updates.append(stand.servers[0].alive))
    engine.fleet.silent(stand.urls[0])  # a request got no response
    with Restarter(stand, engine, lambda url: 0, said.append):
        assert engine.fleet.unsettled() == stand.urls
        engine.sleep()
        assert updates == [False] and len(said) == 1 and "no response for 0.5 s; killing it" in said[0]


@pytest.fixture
def two_nodes(stand, tmp_path):
    """Rank 0's view of two nodes with one server each, and the launcher of the second."""
    store = Store("127.0.0.1", 0, Deadline(20), "secret", serve=True)
    with Stand(ServerOptions(str(tmp_path), "float32", 64), tmp_path, max_restarts=1, first=1) as other:
        other.start()
        other.wait()
        with NodeAgent(1, other, Store("127.0.0.1", store.port, Deadline(20), "secret")):
            yield NodeLaunchers(stand, store, [1], 1), other


def test_a_server_of_another_node_is_restarted_from_rank_0_up_to_the_limit(two_nodes, tmp_path):
    nodes, other = two_nodes
    urls = [server.url for server in nodes.servers]
    assert urls[1] == other.urls[0] and [log.name for log in nodes.logs] == ["vllm_0.log", "vllm_1.log"]
    engine, said = VllmEngine(urls, str, patience=5.0), []
    with Restarter(nodes, engine, lambda url: 0, said.append):
        kill(other.servers[0])
        wait_until(lambda: len(said) == 2)
        assert "was killed by SIGKILL; restarting it, 1 of 1 times (rollout.max_restarts); log: " in said[0]
        assert said[1] == f"vLLM server {urls[1]} is back, with weight version 0"
        nodes.servers[1].end()
        wait_until(lambda: len(said) == 3)
    assert "restart limit 1 reached (rollout.max_restarts)" in said[2] and nodes.restarts[urls[1]] == 1
    assert engine.fleet.states() == {urls[0]: State.SERVING, urls[1]: State.GONE}


def test_a_node_that_fails_is_reported_and_its_server_is_ended_at_the_next_try(two_nodes, tmp_path, monkeypatch):
    nodes, other = two_nodes
    urls = [server.url for server in nodes.servers]
    engine, said, ends = VllmEngine(urls, str, patience=5.0), [], []
    end = other.servers[0].end

    def failing():
        ends.append(0)
        if len(ends) == 1:
            raise OSError("no such process")
        end()

    monkeypatch.setattr(other.servers[0], "end", failing)
    monkeypatch.setattr(restarts, "KILL_SILENT_SECONDS", 0.2)
    with Restarter(nodes, engine, lambda url: 0, said.append):
        engine.fleet.silent(urls[1])
        stop(other.servers[0])
        wait_until(lambda: any("was killed" in line or "ended with" in line for line in said), seconds=30)
    assert any(
        "trying again: node 1: end of a vLLM server failed: OSError: no such process" in line for line in said
    ), said
    assert len(ends) > 1


def test_an_order_that_fails_on_another_node_says_so_and_the_agent_goes_on(two_nodes):
    nodes, other = two_nodes
    assert nodes.restart(1).startswith("node 1: restart of a vLLM server failed: AssertionError")  # it is alive
    nodes.servers[1].end()
    assert not nodes.servers[1].alive and nodes.restart(1).endswith(f"log: {other.logs[0]}")
