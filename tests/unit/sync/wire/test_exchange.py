"""The key-value store, and the errors when a member cannot be reached."""

import os
import socket
import threading
import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megagrpo.engine.http.access import address_of
from megagrpo.platform.rendezvous.store_exchange import Deadline, Exchange, Store, is_here, own_address
from megagrpo.sync.trainer_side.send_plan import _check_coverage
from megagrpo.sync.vllm_side.p2p_receiver import P2pReceiver
from megagrpo.sync.vllm_side.receiver import Worker
from megagrpo.sync.wire.rank_boxes import RankBoxes
from megagrpo.sync.wire.store_messages import DirectRequest
from megagrpo.types import WeightSyncError
from tests.listening import listening


@pytest.fixture
def store():
    return Store("127.0.0.1", 0, Deadline(5), "secret", serve=True)


def test_a_note_is_taken_as_soon_as_it_is_written(store):
    other = Store("127.0.0.1", store.port, Deadline(5), "secret")
    threading.Timer(0.2, lambda: other.put("key", {"a": [1, None]})).start()
    assert store.find("key") is None and store.wait_for("key", "a note", Deadline(5)) == {"a": [1, None]}
    store.remove(["key", "was never there"])
    assert other.find("key") is None


def test_a_timeout_names_the_missing_peer_and_an_abort_names_its_rank(store):
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"waiting for worker 3: timed out after 0\.3 s"):
        store.wait_for("key", "worker 3", Deadline(0.3))
    assert time.monotonic() - began < 2
    store.put("here", 1)
    with pytest.raises(WeightSyncError, match="waiting for worker 3: rank 1: no more memory"):
        store.take_all(["here", "key"], ["worker 2", "worker 3"], Deadline(30), lambda: "rank 1: no more memory")
    with pytest.raises(WeightSyncError, match=r"waiting for the decision: timed out after 0\.3 s"):
        store.take("key", "the decision", Deadline(0.3))


def test_a_value_is_taken_by_one_request_that_waits(store):
    other = Store("127.0.0.1", store.port, Deadline(5), "secret")
    threading.Timer(0.2, lambda: other.put("key", [1])).start()
    assert store.take("key", "a value", Deadline(5)) == [1]
    other.put("second", [2])
    assert other.take_all(["key", "second"], ["a", "b"], Deadline(5), lambda: "") == [[1], [2]]
    assert store.find_all([]) == []


def test_a_board_that_is_gone_is_told_and_noticed():
    served = Store("127.0.0.1", 0, Deadline(5), "secret", serve=True)
    other = Store("127.0.0.1", served.port, Deadline(5), "secret")
    assert other.answers()
    port = served.port
    del served
    assert not other.answers()
    with pytest.raises(WeightSyncError, match="connection to the trainer's store lost"):
        other.put("key", 1)
    with pytest.raises(WeightSyncError, match=rf"the trainer's store at 127\.0\.0\.1:{port} cannot be reached"):
        Store("127.0.0.1", port, Deadline(0.5), "secret")


def test_a_worker_on_another_kind_of_device_says_so():
    request = DirectRequest("host", 1, "secret", 1, "cpu", "float32", limit=1, ranks=1)
    with pytest.raises(
        WeightSyncError,
        match="the trainer's weights are on cpu and this worker is on cuda; p2p requires the same device type",
    ):
        P2pReceiver(Worker(0, torch.device("cuda", 0), None)).open(asdict(request), 1)


def test_a_tensor_that_the_workers_of_a_server_do_not_take_in_whole_is_named():
    rank_boxes = RankBoxes({"v": ((2,), {((0,), (2,)): [0]}), "w": ((4, 6), {((0, 0), (4, 6)): [0]})})
    boxes = {
        "whole": {"v": [((0,), (2,))], "w": [((0, 0), (4, 6))]},
        "left": {"v": [((0,), (2,))], "w": [((0, 0), (4, 3))]},
    }
    boxes["right"] = {"w": [((0, 3), (4, 6))]}
    servers = {"http://a": 1, "http://b": 2, "http://c": 1}
    keys = ["whole", "left", "right", "whole"]
    _check_coverage(rank_boxes, servers, keys, [boxes[key] for key in keys])
    with pytest.raises(WeightSyncError, match=r"http://c: no worker read w\[0:4, 3:6\]"):
        _check_coverage(rank_boxes, servers, [*keys[:3], "left"], [boxes[key] for key in (*keys[:3], "left")])


def test_servers_of_this_host_are_told_from_others():
    assert (
        is_here("http://127.0.0.1:8000")
        and is_here("http://localhost:8000")
        and own_address("http://127.0.0.1:8000") == "127.0.0.1"
    )
    assert not is_here("http://192.0.2.1:8000")  # a documentation address that no host has


def exchange_by(address):
    """A rank that forms a group by a store at `address`; returns the addresses that it listens on for the group."""
    store, before = None, listening([os.getpid()])
    if dist.get_rank() == 0:
        store = Store(address, 0, Deadline(10), "secret", serve=True)
    ports = [store and store.port]
    dist.broadcast_object_list(ports)
    store = store or Store(address, ports[0], Deadline(10), "secret")
    formed = Exchange(store, "group", dist.get_rank(), 2, torch.device("cpu"), Deadline(10))
    addresses = listening([os.getpid()])
    formed.close()
    return addresses - before


def test_a_group_for_weights_listens_on_the_address_of_its_board_also_where_ranks_stay_on_loopback():
    addresses = {name: own for _, name in socket.if_nameindex() if name != "lo" and (own := _address(name))}
    if not addresses:
        pytest.skip("this machine has no other interface than loopback")
    address = next(iter(addresses.values()))
    written = bytes(reversed(socket.inet_aton(address))).hex().upper()
    assert run_ranks(exchange_by, 2, address) == [{written}, {written}]


def _address(interface):
    try:
        return address_of(interface)
    except ValueError:
        return None
