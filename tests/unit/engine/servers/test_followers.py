"""Servers on several nodes: orders of the first node, reports of the others, and the end of the whole server with any
of its parts. The parts are ordinary processes; tests/e2e/test_server_nodes.py has parts of vLLM."""

import threading
import time
from contextlib import ExitStack

import pytest

from megagrpo.config import load_config
from megagrpo.engine.http.connections import healthy
from megagrpo.engine.http.protocol import EngineStartError
from megagrpo.engine.servers import followers as followers_module
from megagrpo.engine.servers import launcher as launcher_module
from megagrpo.engine.servers import remote
from megagrpo.engine.servers.followers import Followers, Reports
from megagrpo.engine.servers.options import NodePorts, ServerNode, ServerOptions
from megagrpo.engine.servers.serve_inputs import place_of
from megagrpo.types import WeightSyncError
from tests.unit.config.test_placement import QUICKSTART
from tests.unit.engine.servers.test_restarts import Stand, kill, wait_until

HERE, TOKEN = "127.0.0.1", "a-token-of-the-tests-1234"
PORTS = NodePorts(21001, 21002)


@pytest.fixture
def pair():
    """The first node's view of a server on two nodes, and the second node's end."""
    leader = Followers(HERE, 0, TOKEN, 2)
    return leader, Reports(HERE, leader.port, TOKEN, 1, "n2", 5, threading.Event())


def test_each_start_is_one_order(pair):
    leader, follower = pair
    assert follower.order() is None
    for ports in (PORTS, NodePorts(1, 2)):
        leader.start(ports)
        assert follower.order() == ports and follower.order() is None


def test_a_node_that_never_reported_is_missing_and_no_fault(pair):
    leader, follower = pair
    assert leader.missing() == [1] and leader.fault() is None
    follower.put()
    assert leader.missing() == [] and leader.fault() is None


def test_the_end_of_a_part_is_a_fault_until_the_next_start(pair):
    leader, follower = pair
    leader.start(PORTS)
    follower.order()
    follower.put(exit="was killed by SIGKILL", killed=True, log="n2/vllm_0.log")
    fault = leader.fault()
    assert fault.text == "was stopped because its part on node 1 (n2) was killed by SIGKILL (log there: n2/vllm_0.log)"
    assert fault.killed and not leader.lost
    leader.start(PORTS)
    assert leader.fault() is None


def test_a_node_is_lost_when_its_command_ends_or_says_nothing(pair, monkeypatch):
    leader, follower = pair
    monkeypatch.setattr(followers_module, "LOST_SECONDS", 0.2)
    follower.put()
    for _ in range(8):  # reports that go on
        follower.put()
        assert leader.fault() is None
        time.sleep(0.05)
    wait_until(leader.fault)
    assert leader.fault() and leader.lost == "node 1 (n2) has not reported for 0.2 s"
    with follower:
        follower.put()
    assert leader.fault().text == "was stopped because megagrpo serve on node 1 (n2) has ended"


def test_a_node_without_the_token_is_refused(pair):
    leader, _ = pair
    leader.start(PORTS)
    stranger = Reports(HERE, leader.port, "another-token-1234", 1, "n2", 5, threading.Event())
    with pytest.raises(WeightSyncError, match="the store of the server's first node: key order has an invalid HMAC"):
        stranger.order()


class TwoNodes(ExitStack):
    """Two nodes on this host: the first node's launcher, and a thread with the second node's command."""

    def __init__(self, folder, **options):
        super().__init__()
        (folder / "config.json").write_text("{}")
        settings = ServerOptions(str(folder), "float32", 64, tp=2, nodes=2)
        self.store, self.stop = Followers(HERE, 0, TOKEN, 2), threading.Event()
        self.first = Stand(settings, folder / "n1", node=ServerNode(0, HERE, HERE), followers=self.store, **options)
        second = ServerNode(1, HERE, HERE)
        self.second = Stand(settings, folder / "n2", node=second, token=TOKEN)
        self.codes = []
        arguments = self.second, second, self.store.port, "n2", self.stop
        self.follower = threading.Thread(target=lambda: self.codes.append(remote._follow(*arguments)))

    def __enter__(self):
        self.callback(self.follower.join, 20)
        self.callback(self.stop.set)
        self.enter_context(self.first)
        self.follower.start()
        self.first.start()
        self.first.wait()
        wait_until(lambda: self.second.servers and self.second.servers[0].alive)
        return self


def test_a_server_ends_and_restarts_with_any_of_its_parts(tmp_path):
    with TwoNodes(tmp_path, max_restarts=2) as nodes:
        server, part = nodes.first.servers[0], nodes.second.servers[0]
        nodes.first.end_incomplete()
        assert server.alive
        kill(part)
        wait_until(lambda: nodes.first.end_incomplete() or not server.alive)
        assert "was stopped because its part on node 1 (n2) was killed by SIGKILL" in nodes.first.restart(0)
        wait_until(
            lambda: (
                nodes.second.servers[0] is not part and nodes.second.servers[0].alive and healthy(nodes.first.urls[0])
            )
        )
        part = nodes.second.servers[0]
        kill(nodes.first.servers[0])
        nodes.first.restart(0)
        wait_until(lambda: nodes.second.servers[0] is not part and not part.alive)
    assert nodes.codes == [0]


def test_with_its_node_a_server_is_gone_for_good_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote, "SERVE_LOOP_SECONDS", 0.01)
    with TwoNodes(tmp_path, max_restarts=2) as nodes:
        nodes.stop.set()
        assert remote._watch(nodes.first, threading.Event(), 60) is False
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: vLLM server ")]
    assert "was stopped because megagrpo serve on node 1 (n2) has ended; it cannot restart without this node" in line


def test_a_follower_ends_its_part_when_the_first_node_has_ended(tmp_path, capsys):
    with TwoNodes(tmp_path) as nodes:
        part = nodes.second.servers[0]
        nodes.store = nodes.first.followers = None
        nodes.follower.join(20)
        assert nodes.codes == [1] and not part.alive
    assert "the server's first node 127.0.0.1:" in capsys.readouterr().err


def test_a_server_that_waits_for_a_node_names_it_and_logs_few_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_module, "FIRST_WAIT_SECONDS", 0.05)
    said = []
    (tmp_path / "config.json").write_text("{}")
    store = Followers(HERE, 0, TOKEN, 2)
    settings = ServerOptions(str(tmp_path), "float32", 64, tp=2, nodes=2)

    class Silent(Stand):
        def _command(self, port):
            return ["sleep", "60"]

    with Silent(settings, tmp_path, node=ServerNode(0, HERE, HERE), followers=store, startup_timeout=1.2) as launcher:
        launcher.start()
        with pytest.raises(
            EngineStartError, match=r"rollout\.startup_timeout\); megagrpo serve has not joined it on node 1"
        ):
            launcher.wait(said.append)
    # at 0.05 s, 0.1 s, 0.2 s ...
    assert 1 <= len(said) <= 6 and all(line.startswith("waiting for 1 vLLM server: ") for line in said)


NODES = ("rollout.tp=2", "rollout.nodes_per_server=2", "rollout.placement=dedicated", "run.nodes=4")


def spanned(heads, node=None, *overrides):
    rollout = load_config(QUICKSTART, [*NODES, *overrides]).rollout
    place = place_of(rollout.nodes_per_server, heads, node)
    return remote.this_node(place, rollout.startup_timeout, threading.Event()), place.port


def test_nodes_of_a_server_follow_each_other_and_slurm_numbers_them(monkeypatch):
    heads = "127.0.0.1:29600,127.0.0.2:29601"
    assert [spanned(heads, node) for node in range(4)] == [
        (ServerNode(0, HERE, HERE), 29600),
        (ServerNode(1, HERE, HERE), 29600),
        (ServerNode(0, "127.0.0.2", "127.0.0.2"), 29601),
        (ServerNode(1, HERE, "127.0.0.2"), 29601),
    ]
    monkeypatch.setenv("SLURM_NODEID", "2")
    assert spanned(heads) == spanned(heads, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("127.0.0.1:1", 2),
            r"--node: 2, but there are 2 nodes, rollout\.nodes_per_server 2 for each address of --head; use 0 to 1",
        ),
        (("127.0.0.1:1", None), r"--node: missing, but there are 2 nodes"),
        (("127.0.0.1", 0), r"--head: 127\.0\.0\.1 is not HOST:PORT; write it as 10\.0\.0\.1:29600"),
        (("no-such-host.invalid:1", 0, "rollout.startup_timeout=0.1"), r"--head: no-such-host\.invalid is unknown"),
        (
            ("127.0.0.1:1", 0, "rollout.nodes_per_server=1"),
            r"--head: 127\.0\.0\.1:1 only applies to servers on several nodes; set",
        ),
    ],
)
def test_a_wrong_span_is_refused(arguments, message, monkeypatch):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    with pytest.raises(ValueError, match=message):
        spanned(*arguments)
