"""The board of notes, and the errors when a member cannot be reached."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megagrpo.engine.access import address_of
from megagrpo.sync.trainer_side.point_to_point import PointToPoint
from megagrpo.sync.vllm_side.receiver import Receiver
from megagrpo.sync.wire.exchange import Board, Deadline, Exchange, is_here, own_address
from megagrpo.sync.wire.manifest import WeightSyncError
from megagrpo.sync.wire.notes import DirectRequest
from megagrpo.sync.wire.roster import Roster
from tests.listening import listening


@pytest.fixture
def board():
    return Board("127.0.0.1", 0, Deadline(5), "secret", serve=True)


def test_a_note_is_taken_as_soon_as_it_is_written(board):
    other = Board("127.0.0.1", board.port, Deadline(5), "secret")
    threading.Timer(0.2, lambda: other.put("key", {"a": [1, None]})).start()
    assert board.find("key") is None and board.take("key", "a note", Deadline(5)) == {"a": [1, None]}
    board.remove(["key", "was never there"])
    assert other.find("key") is None


def test_a_timeout_names_the_missing_peer_and_an_abort_names_its_rank(board):
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"waiting for worker 3: timed out after 0\.3 s"):
        board.take("key", "worker 3", Deadline(0.3))
    assert time.monotonic() - began < 2
    board.put("stop", "rank 1: no more memory")
    with pytest.raises(WeightSyncError, match="waiting for worker 3: rank 1: no more memory"):
        board.take("key", "worker 3", Deadline(30), stop="stop")


def test_a_board_that_is_gone_is_told_and_noticed():
    served = Board("127.0.0.1", 0, Deadline(5), "secret", serve=True)
    other = Board("127.0.0.1", served.port, Deadline(5), "secret")
    assert other.answers()
    port = served.port
    del served
    assert not other.answers()
    with pytest.raises(WeightSyncError, match="connection to the trainer's board lost"):
        other.put("key", 1)
    with pytest.raises(WeightSyncError, match=rf"the trainer's board at 127\.0\.0\.1:{port} cannot be reached"):
        Board("127.0.0.1", port, Deadline(0.5), "secret")


def test_a_worker_on_another_kind_of_device_says_so():
    request = DirectRequest(
        "host", 1, "secret", "roster", "update1", "cpu", "float32", limit=1, ranks=1, first_worker=0, seconds=1.0
    )
    with pytest.raises(
        WeightSyncError,
        match="the trainer's weights are on cpu and this worker is on cuda; p2p requires the same device type",
    ):
        Receiver(torch.device("cuda", 0)).start(request, 1, 0, None)


def test_a_tensor_that_the_workers_of_a_server_do_not_take_in_whole_is_named():
    transport = PointToPoint(None, "float32", torch.device("cpu"))
    transport.roster = Roster({"v": ((2,), {((0,), (2,)): [0]}), "w": ((4, 6), {((0, 0), (4, 6)): [0]})})
    notes = {
        "whole": {"v": [((0,), (2,))], "w": [((0, 0), (4, 6))]},
        "left": {"v": [((0,), (2,))], "w": [((0, 0), (4, 3))]},
    }
    notes["right"] = {"w": [((0, 3), (4, 6))]}
    transport.servers = {"http://a": 1, "http://b": 2, "http://c": 1}
    transport._check_coverage(["whole", "left", "right", "whole"], notes)
    with pytest.raises(WeightSyncError, match=r"http://c: no worker read w\[0:4, 3:6\]"):
        transport._check_coverage(["whole", "left", "right", "left"], notes)


def test_servers_of_this_host_are_told_from_others():
    assert (
        is_here("http://127.0.0.1:8000")
        and is_here("http://localhost:8000")
        and own_address("http://127.0.0.1:8000") == "127.0.0.1"
    )
    assert not is_here("http://192.0.2.1:8000")  # a documentation address that no host has


def exchange_by(address):
    """A rank that forms a group by a board at `address`; returns the addresses that it listens on for the group."""
    board, before = None, listening([os.getpid()])
    if dist.get_rank() == 0:
        board = Board(address, 0, Deadline(10), "secret", serve=True)
    ports = [board and board.port]
    dist.broadcast_object_list(ports)
    board = board or Board(address, ports[0], Deadline(10), "secret")
    formed = Exchange(board, "group", dist.get_rank(), 2, torch.device("cpu"), Deadline(10))
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
