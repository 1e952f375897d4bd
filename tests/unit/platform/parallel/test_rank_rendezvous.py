"""The rendezvous of a run: its listening addresses, and the objects that ranks read from each other."""

import json
import os
import pickle
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import distributed_c10d
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from megagrpo.cluster.launch import launcher_rendezvous
from megagrpo.cluster.launch.launcher_rendezvous import Nodes
from megagrpo.platform.parallel.rank_rendezvous import join_world, sign_objects
from megagrpo.platform.process.variables import RENDEZVOUS_VARIABLE
from tests.listening import LOOPBACK, listening


def agent(rank, num_nodes, address, port):
    """The information for a torchrun agent at the rendezvous, and the addresses that it then listens on."""
    parameters = RendezvousParameters("megagrpo", f"{address}:{port}", "run", num_nodes, num_nodes, rank=str(rank))
    handler = rendezvous_handler_registry.create_handler(parameters)
    found = handler.next_rendezvous()
    found.store.set(f"here {rank}", "yes")
    found.store.wait([f"here {other}" for other in range(num_nodes)], timedelta(seconds=30))
    return (found.rank, found.world_size, handler.use_agent_store, handler.num_nodes_waiting(), found), listening(
        [os.getpid()]
    )


def free_port(address):
    with launcher_rendezvous.listen(f"{address}:0") as opened:
        return opened.getsockname()[1]


def test_the_agent_of_one_node_listens_nowhere():
    before = listening([os.getpid()])
    (rank, size, shares_its_store, *_), addresses = agent(0, 1, "127.0.0.1", 0)
    assert (rank, size, shares_its_store) == (0, 1, False) and addresses == before


def test_the_first_of_several_agents_listens_on_the_master_address_alone():
    port, context = free_port("127.0.0.2"), get_context("fork")
    second = context.Process(target=agent, args=(1, 2, "127.0.0.2", port))
    second.start()
    before = listening([os.getpid()])
    (rank, size, shares_its_store, waiting, _), addresses = agent(0, 2, "127.0.0.2", port)
    second.join(30)
    assert (rank, size, shares_its_store, waiting, second.exitcode) == (0, 2, True, 0, 0)
    assert addresses - before == {"0200007F"}


def leave(rank, port, seconds):
    """An agent that still needs the store after `seconds`."""
    parameters = RendezvousParameters("megagrpo", f"127.0.0.1:{port}", "run", 2, 2, rank=str(rank))
    handler = rendezvous_handler_registry.create_handler(parameters)
    store = handler.next_rendezvous().store
    time.sleep(seconds)
    store.add("late", 1)  # waits for an answer
    handler.shutdown()


def test_the_agent_that_serves_the_store_ends_last():
    port, context = free_port("127.0.0.1"), get_context("fork")
    agents = [context.Process(target=leave, args=(rank, port, 1.5 * rank)) for rank in (0, 1)]
    for one in agents:
        one.start()
    for one in agents:
        one.join(30)
    assert [one.exitcode for one in agents] == [0, 0]


def test_the_folder_of_the_ranks_is_for_their_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, "of another run")
    words = launcher_rendezvous.options(Nodes())
    folder = Path(os.environ[RENDEZVOUS_VARIABLE])
    assert (
        folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0 and len((folder / "secret").read_text()) == 64
    )
    assert (folder / "secret").read_text() not in " ".join(words)
    several = launcher_rendezvous.options(Nodes(1, 2, "10.0.0.1", 29400))
    assert RENDEZVOUS_VARIABLE not in os.environ and "--rdzv-endpoint=10.0.0.1:29400" in several


def meet(folder, forged):
    """A rank of a run: joins the others in `folder`, then reads the messages of all ranks. Rank 1 sends `forged`
    unsigned, if given."""
    dist.destroy_process_group()
    os.environ |= {
        "MEGAGRPO_RENDEZVOUS": str(folder),
        "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    join_world("gloo", timedelta(seconds=30))
    sent = {"rank": dist.get_rank()}
    if forged is not None and dist.get_rank() == 1:
        sent, distributed_c10d._pickler = forged, pickle.Pickler
    everyone = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, sent)
    except pickle.UnpicklingError as error:
        return str(error), listening([os.getpid()])
    return everyone, listening([os.getpid()])


class Evil:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef")
    return tmp_path


def test_ranks_of_one_node_meet_in_a_file_and_listen_on_loopback_alone(folder):
    for objects, addresses in run_ranks(meet, 2, folder, None):
        assert objects == [{"rank": 0}, {"rank": 1}] and addresses == {LOOPBACK}


def test_an_object_without_the_code_of_the_run_is_refused_and_runs_nothing(folder):
    proof = folder / "it ran"
    for told, _ in run_ranks(meet, 2, folder, Evil(proof)):
        assert told == "rejected an object from another rank: its authentication code is not this run's"
    assert not proof.exists()


def test_megatron_sends_objects_through_the_same_two_functions(monkeypatch):
    """torch's collectives of objects all pickle through these names; if torch renames them, this test fails."""
    monkeypatch.setattr(distributed_c10d, "_pickler", pickle.Pickler)
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    sign_objects(b"a secret")
    sent, size = distributed_c10d._object_to_tensor([1, "two"], torch.device("cpu"), None)
    assert distributed_c10d._tensor_to_object(sent, int(size), None) == [1, "two"]
    sent[-2] ^= 1
    with pytest.raises(pickle.UnpicklingError, match="its authentication code is not this run's"):
        distributed_c10d._tensor_to_object(sent, int(size), None)


def test_ranks_on_several_nodes_without_a_token_are_refused(monkeypatch, tmp_path):
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MEGAGRPO_TOKEN", "MEGAGRPO_TOKEN_FILE", "MEGAGRPO_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ValueError, match=r"MEGAGRPO_TOKEN_FILE: on several nodes ranks sign .*`openssl rand -hex 32` makes one"
    ):
        join_world("gloo", timedelta(seconds=1))
    monkeypatch.setenv("MEGAGRPO_TOKEN_FILE", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"MEGAGRPO_TOKEN_FILE: .*nothing cannot be read: No such file"):
        join_world("gloo", timedelta(seconds=1))
    (tmp_path / "token").touch(0o644)
    monkeypatch.setenv("MEGAGRPO_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(ValueError, match=r"MEGAGRPO_TOKEN_FILE: .*token is readable by other users"):
        join_world("gloo", timedelta(seconds=1))


RANK = """
import importlib.util, json, os, sys
from datetime import timedelta
import torch.distributed as dist
spec = importlib.util.spec_from_file_location("own_rendezvous", sys.argv[1])  # without megatron, whose import is slow
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.join_world("gloo", timedelta(seconds=60))
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, [os.environ["RANK"], os.environ["GROUP_RANK"], dist.distributed_c10d._unpickler.__name__])
from tests.listening import LOOPBACK, listening
print(json.dumps([everyone, sorted(listening([os.getpid(), os.getppid()]))]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_ranks_of_two_nodes_meet_at_the_master_address_and_sign_with_the_token(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("a-token-of-both-nodes")
    root = Path(launcher_rendezvous.__file__).parents[3]
    imports = "import sys; from megagrpo.cluster.launch.launcher_rendezvous import Nodes; "
    imports += "from megagrpo.cluster.launch.local import run_ranks; "
    code = imports + "sys.exit(run_ranks(2, {!r}, {!r}))"
    words = [str(tmp_path / "rank.py"), str(root / "megagrpo/platform/parallel/rank_rendezvous.py")]
    port, environment = (
        free_port("127.0.0.2"),
        {**os.environ, "PYTHONPATH": str(root), "MEGAGRPO_TOKEN_FILE": str(tmp_path / "token")},
    )
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    nodes = []
    for node in range(2):
        program = code.format(words, Nodes(rank=node, num_nodes=2, address="127.0.0.2", port=port))
        nodes.append(
            subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        )
    told = [json.loads(line) for node in nodes for line in node.communicate(timeout=200)[0].splitlines()]
    assert [node.returncode for node in nodes] == [0, 0] and len(told) == 4
    for everyone, addresses in told:
        assert everyone == [
            ["0", "0", "Checking"],
            ["1", "0", "Checking"],
            ["2", "1", "Checking"],
            ["3", "1", "Checking"],
        ]
        assert set(addresses) <= {LOOPBACK, "0200007F"}
    assert any("0200007F" in addresses for _, addresses in told)
