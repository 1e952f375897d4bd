"""Placement of servers and weight sync transport: chosen with a reason; contradictions are refused with a fix."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from megagrpo.config import ConfigError, load_config, weight_path
from megagrpo.config.sections.transport_table import TRANSPORTS
from megagrpo.engine.servers import serving
from megagrpo.planner import plan
from megagrpo.sync.trainer_side.point_to_point import PointToPoint
from megagrpo.sync.trainer_side.transport import Update, transport_class
from megagrpo.sync.vllm_side.receiver import BlockSource, Receiver, receiver_class
from megagrpo.trainer import engine_side
from megagrpo.types import WeightSyncError
from tests.unit.for_each import for_each

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
NODES = "run.nodes=2"
URLS = "rollout.urls=[http://10.0.0.7:8000]"
ON_TWO = ("rollout.nodes_per_server=2", "rollout.tp=2")


def config(*overrides):
    return load_config(QUICKSTART, overrides)


@for_each(
    ("overrides", "gpu", "one_host", "transport", "why"),
    [
        ([], False, True, "shared_memory", "single host"),
        ([], False, False, "p2p", "several hosts"),
        ([NODES, "rollout.servers=2"], False, False, "shared_memory", "each node's servers get weights from its ranks"),
        ([], True, True, "cuda_ipc", "the servers share the trainer's GPUs"),
        ([], True, False, "p2p", "rollout.placement is colocated, several hosts"),
        ([NODES, "rollout.servers=2"], True, False, "cuda_ipc", "each node's servers get weights from its ranks"),
        (
            [NODES, "rollout.servers=2", "rollout.weight_sync_transport=shared_memory"],
            True,
            False,
            "shared_memory",
            "each node's servers get weights from its ranks",
        ),
        (["rollout.weight_sync_transport=p2p"], False, False, "p2p", "set by rollout.weight_sync_transport"),
        (["rollout.placement=dedicated"], True, False, "p2p", "rollout.placement is dedicated, several hosts"),
        (["rollout.placement=dedicated"], True, True, "p2p", "rollout.placement is dedicated"),
        (["rollout.placement=dedicated"], False, True, "shared_memory", "single host"),
        ([URLS], True, False, "p2p", "rollout.placement is external, several hosts"),
        ([URLS, "rollout.placement=external"], False, True, "shared_memory", "single host"),
        (["rollout.weight_sync_transport=p2p"], False, True, "p2p", "set by rollout.weight_sync_transport"),
        ([URLS, *ON_TWO], False, True, "p2p", "several hosts"),  # only the servers' first nodes may be here
        ([URLS, *ON_TWO], True, True, "p2p", "rollout.placement is external, several hosts"),
        (
            ["rollout.weight_sync_transport=shared_memory"],
            True,
            True,
            "shared_memory",
            "set by rollout.weight_sync_transport",
        ),
        (["lora.rank=8", "lora.sync=adapter"], True, True, "shared_memory", "lora.sync adapter sends files"),
        (
            ["lora.rank=8", "lora.sync=adapter"],
            *(True, False, "shared_memory", "lora.sync adapter sends files, to other hosts over HTTP"),
        ),
        (
            ["lora.rank=8", "lora.sync=adapter", "model.base_storage=nf4"],
            *(False, False, "p2p", "several hosts"),  # of the weights below
        ),
    ],
)
def test_a_transport_is_chosen_for_a_reason(overrides, gpu, one_host, transport, why):
    assert weight_path(config(*overrides), gpu, one_host) == (transport, why)


@pytest.mark.parametrize(
    ("overrides", "gpu", "one_host", "message"),
    [
        (
            ["rollout.weight_sync_transport=cuda_ipc"],
            False,
            True,
            "cuda_ipc needs GPUs, but this host has no GPU; set it to auto",
        ),
        (
            ["rollout.weight_sync_transport=shared_memory", "rollout.placement=dedicated"],
            *(True, False, "shared_memory needs all ranks and servers on one host; set it to"),
        ),
        (
            ["rollout.weight_sync_transport=p2p"],
            True,
            True,
            "p2p uses NCCL, which refuses two processes on one GPU, .* set the transport to",
        ),
    ],
)
def test_a_transport_that_does_not_reach_the_servers_is_refused(overrides, gpu, one_host, message):
    with pytest.raises(ValueError, match=message):
        weight_path(config(*overrides), gpu, one_host)


@for_each(
    ("overrides", "message"),
    [
        (
            ["rollout.placement=external"],
            "rollout.placement: external needs .* running servers, but rollout.urls is empty; list them",
        ),
        (
            [URLS, "rollout.placement=colocated"],
            "rollout.placement: colocated servers are started by the run, but rollout.urls lists external ones",
        ),
        (
            [URLS, "rollout.placement=dedicated"],
            "rollout.placement: dedicated servers are started by the run, but rollout.urls lists external ones",
        ),
        ([URLS, "rollout.weight_sync_transport=cuda_ipc"], "but rollout.placement is external; choose p2p or auto"),
        (
            ["rollout.placement=dedicated", "rollout.weight_sync_transport=cuda_ipc"],
            "but rollout.placement is dedicated; choose p2p",
        ),
        (
            ["rollout.placement=dedicated", "train.offload=true"],
            "train.offload: true frees GPU memory .* but rollout.placement is dedicated",
        ),
        (
            [URLS, "rollout.max_staleness=1", "train.offload=true"],
            "train.offload: true offloads the trainer while servers generate",
        ),
        (
            [URLS, "rollout.nodes_per_server=3", "rollout.tp=2", "rollout.pp=2"],
            r"rollout.nodes_per_server: 3 nodes cannot share 4 devices \(rollout.tp 2 x rollout.pp 2\) evenly; use 2",
        ),
        (
            [URLS, *ON_TWO, "rollout.dp=3", "rollout.enable_expert_parallel=true"],
            "rollout.nodes_per_server: 2 nodes and rollout.dp 3 copies: neither divides the other, .*; change one",
        ),
        (
            [*ON_TWO],
            "rollout.nodes_per_server: 2 nodes .* but rollout.placement is colocated; choose dedicated or external, "
            "or set",
        ),
        (
            [*ON_TWO, "rollout.placement=dedicated", "rollout.servers=2", "run.nodes=3"],
            "rollout.nodes_per_server: 2 nodes x rollout.servers 2 need 4 nodes, but run.nodes is 3; raise it",
        ),
        (
            [URLS, *ON_TWO, "rollout.weight_sync_transport=shared_memory"],
            "rollout.weight_sync_transport: shared_memory reaches one host, but nodes_per_server is 2; set the "
            "transport to auto or p2p",
        ),
        (
            ["lora.rank=8", "lora.sync=adapter", "rollout.weight_sync_transport=p2p"],
            "p2p sends weights, but lora.sync adapter sends",
        ),
    ],
)
def test_contradictions_are_refused_with_a_fix(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


OWN = "rollout.weight_sync_transport=package.module:Class"


@for_each("overrides", [[], [URLS], [NODES, "rollout.servers=2"]])
@for_each("gpu", [False, True])
@for_each("one_host", [False, True])
def test_a_transport_of_ones_own_is_taken_wherever_the_servers_are(overrides, gpu, one_host):
    expected = ("package.module:Class", "set by rollout.weight_sync_transport")
    assert weight_path(config(OWN, *overrides), gpu, one_host) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.weight_sync_transport=nccl"], "must be 'auto', 'shared_memory', .*, or your own as FILE.py:NAME"),
        ([OWN, "lora.rank=8", "lora.sync=adapter"], "package.module:Class sends weights, but lora.sync adapter sends"),
    ],
)
def test_a_name_that_is_no_transport_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_a_transport_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path):
    base = "from megagrpo.sync.trainer_side.transport import Transport\n"
    (tmp_path / "own.py").write_text(f"{base}class Own:\n    pass\nclass Half(Transport):\n    pass\n")
    key = "rollout.weight_sync_transport"
    named = config(f"{key}={tmp_path}/own.py:Other")
    assert any(f"{key}: {tmp_path}/own.py defines no `Other`" in str(problem) for problem in plan(named, 1).problems)
    for name, reason in [
        (f"{tmp_path}/own.py:Own", "is not a subclass of megagrpo.sync.trainer_side.transport.Transport"),
        (f"{tmp_path}/own.py:Half", "does not define prepare; add it"),
        (
            f"{tmp_path}/own.py:Other",
            f"cannot be loaded: AttributeError: {tmp_path}/own.py has no function or class `Other`; it has: Own, Half",
        ),
        (f"{tmp_path}/missing.py:Own", "cannot be loaded: FileNotFoundError: "),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"{key}: {name} {reason}")):
            transport_class(name)


def test_an_end_of_a_transport_without_a_method_is_refused(tmp_path):
    base = "from megagrpo.sync.vllm_side.receiver import Receiver\n"
    (tmp_path / "end.py").write_text(f"{base}class Half(Receiver):\n    pass\n")
    with pytest.raises(WeightSyncError, match=r"end\.py:Half does not define open"):
        receiver_class(f"{tmp_path}/end.py:Half")
    with pytest.raises(NotImplementedError, match="BlockSource does not define values"):
        BlockSource(None).values("", 0, ())
    with pytest.raises(TypeError, match=r"abstract class Half .*'request', 'verify'"):
        type("Half", (Update,), {"send": None})(index=None, receiver="")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_both_ends_of_every_transport_can_be_loaded(name):
    assert transport_class(name).receiver == TRANSPORTS[name].receiver
    assert issubclass(receiver_class(TRANSPORTS[name].receiver), Receiver)


def test_the_plan_says_which_way_weights_take_and_why():
    both = dict(plan(config(), 1).rows)["weights"]
    refused = (
        "rollout.weight_sync_transport: p2p uses NCCL, which refuses two processes on one GPU, but rollout.placement is"
    )
    assert [
        str(problem).startswith(refused)
        for problem in plan(config("rollout.weight_sync_transport=p2p"), 1, 80).problems
    ] == [True]
    assert plan(config("rollout.weight_sync_transport=p2p"), 1).problems == []
    assert both == "on GPUs cuda_ipc (the servers share the trainer's GPUs), without GPUs shared_memory (single host)"
    assert (
        dict(plan(config("rollout.placement=dedicated"), 1, gpu_memory_gb=80).rows)["weights"]
        == "p2p (rollout.placement is dedicated)"
    )
    named = dict(plan(config("rollout.weight_sync_transport=cuda_ipc"), 1).rows)["weights"]
    assert named.endswith(
        "without GPUs rollout.weight_sync_transport: cuda_ipc needs GPUs, but this host has no GPU; set it to auto"
    )


@pytest.mark.parametrize(
    ("placement", "num_ranks", "gpus", "sleeps"),
    [
        ("colocated", 2, ["0", "1", "2", "3"], True),
        ("dedicated", 2, ["2", "3"], False),
        ("dedicated", 0, ["0", "1", "2", "3"], False),
    ],
)
def test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them(
    placement, num_ranks, gpus, sleeps, monkeypatch, tmp_path
):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(serving.device, "has_gpu", lambda: True)
    two = config(f"rollout.placement={placement}", "rollout.servers=2")
    launcher = serving.make_launcher(two, tmp_path, tmp_path, "bfloat16", num_ranks=num_ranks)
    assert launcher.devices == gpus and ("--enable-sleep-mode" in launcher._command(8000)) == sleeps
    assert (
        launcher._environment(1)["CUDA_VISIBLE_DEVICES"] == gpus[1]
        and serving.servers_sleep(two.rollout) == serving.offloads(two.rollout, None) == sleeps
    )
    for offload in (True, False):
        assert serving.offloads(two.rollout, config(f"train.offload={offload}".lower()).train.offload) is offload


def test_dedicated_servers_without_gpus_left_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: ["0", "1"])
    with pytest.raises(ValueError, match=r"rollout.servers 1 x rollout.tp 1 need 1 GPUs; 0 were given"):
        serving.make_launcher(config("rollout.placement=dedicated"), tmp_path, tmp_path, "bfloat16", num_ranks=2)


@dataclass(frozen=True)
class TwoRanks:
    """The second of two ranks; the first is on this host, or on another one."""

    first_host: str
    world_rank: int = 1

    def all_gather_objects(self, obj):
        return [(self.first_host, *obj[1:]), obj]


def test_ranks_on_several_hosts_need_servers_that_all_of_them_reach():
    ranks = TwoRanks("elsewhere")
    with pytest.raises(
        ValueError, match=r"rollout\.urls: ranks are on elsewhere, .* the first rank's host only; name an interface"
    ):
        engine_side.choose_transport(config(), ranks, ["http://127.0.0.1:8000"])
    for servers in (URLS, "rollout.interface=eth0"):
        assert engine_side.choose_transport(config(servers), ranks, ["http://10.0.0.7:8000"]) == (
            "p2p",
            "several hosts",
        )
    sync = engine_side.make_weight_sync(config(URLS), None, ranks, "float32", "p2p", tuple, print)
    assert isinstance(sync.transport, PointToPoint)


def test_a_server_on_another_host_is_sent_to():
    assert engine_side.choose_transport(config(URLS), TwoRanks(socket.gethostname()), ["http://192.0.2.1:80"]) == (
        "p2p",
        "several hosts",
    )


@pytest.mark.parametrize(
    ("environment", "overrides", "nodes"),
    [
        ({"GROUP_RANK": "1"}, ["run.nodes=2", "rollout.servers=2"], (1,)),
        ({"LOCAL_WORLD_SIZE": "2"}, ["run.nodes=2", "rollout.servers=2"], (1,)),  # a launcher without torchrun's agent
        ({"GROUP_RANK": "1"}, [], (0,)),
        ({"GROUP_RANK": "1"}, ["run.nodes=2", "rollout.placement=dedicated"], (0,)),
    ],
)
def test_a_rank_knows_its_node_where_each_node_has_servers(environment, overrides, nodes, monkeypatch):
    @dataclass
    class ThirdRank:
        world_rank, world_size = 2, 1

        def all_gather_objects(self, obj):
            return [obj]

    for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = config(*overrides)
    assert engine_side.node_of_each_rank(made.rollout, made.run.nodes, ThirdRank()) == nodes
