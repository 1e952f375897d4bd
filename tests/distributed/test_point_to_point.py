"""Weights straight from ranks to workers, with real processes: all of them arrive, and replicas share the work. A dead
or hung process is named, and the next sync works."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from direct_workers import PER_SERVER, SHAPES, FileEngine, copies_of, held_by, serve, values_of
from ranks import run_ranks
from suites import usual

from megagrpo.platform import device
from megagrpo.platform.rendezvous.store_exchange import Exchange
from megagrpo.sync.trainer_side.point_to_point import PointToPoint
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings
from megagrpo.types import WeightSyncError
from tests.rank_fakes import GroupRanks


def push(num_ranks: int, num_workers: int, folder, versions: list[int], megabytes: float = 64.0, relay: bool = False):
    """Push several versions from ranks; return the workers' weights and the reports of the pushes."""
    rank, own = dist.get_rank(), device.device()
    group = dist.new_group(range(num_ranks), backend="gloo")
    if rank >= num_ranks:
        return serve(rank - num_ranks, folder, len(versions), own)
    ranks = GroupRanks(rank, group)
    transport = PointToPoint(ranks, "float32", TransportSettings(own, 20, megabytes, relay=relay))
    with WeightSync(FileEngine(folder, num_workers, 20) if rank == 0 else None, ranks, "float32", transport) as sync:
        reports, groups, notes = [], set(), []
        for version in versions:
            reports.append(sync.push(held_by(rank, num_ranks, version, own), version))
            groups.add(transport.exchange.name)
            notes.append(transport.store.tcp_store.num_keys() if rank == 0 else 0)
        assert notes[-1] == notes[-2]  # old ones are deleted
        sent = sum(message.elements for messages in transport.rounds.values() for message in messages)
    return reports[-1].bytes_published, reports[-1].bytes_read, sent, len(groups)


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "megabytes"),
    usual([(1, 2, 64.0), (4, 2, 64.0), (2, 4, 2**-16), (3, 2, 2**-18)], 3),
    ids=str,
)
@pytest.mark.skipif(0 < torch.cuda.device_count() < 6, reason="NCCL takes a GPU for each rank and worker")
def test_every_worker_gets_what_its_loaders_copy_and_no_byte_more(num_ranks, num_workers, megabytes, tmp_path):
    results = run_ranks(push, num_ranks + num_workers, num_ranks, num_workers, tmp_path, [1, 2, 3], megabytes)
    need = 0
    for worker, (kept, errors) in enumerate(results[num_ranks:]):
        expected = {}
        copies_of(worker, [(name, values_of(name, 3)) for name in SHAPES], expected)
        assert not errors and kept.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(torch.from_numpy(kept[name]), values), name
        need += sum(values.nbytes for values in expected.values())
    for given, taken, _, groups in results[:num_ranks]:
        assert given == taken == need and groups == 1
    sent = [sent for *_, sent, _ in results[:num_ranks]]
    assert sum(sent) * 4 == need
    if num_ranks == 4:  # 0 and 2 hold the same weights, and so do 1 and 3
        assert all(0.3 < part / (sum(sent) / 2) < 0.7 for part in sent)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "megabytes", "copies"), usual([(1, 64.0, 1), (1, 2**-16, 1), (4, 2**-18, 2)], 2), ids=str
)
@pytest.mark.skipif(0 < torch.cuda.device_count() < 12, reason="NCCL takes a GPU for each rank and worker")
def test_servers_pass_weights_on_and_ranks_send_only_the_copies_that_they_can(num_ranks, megabytes, copies, tmp_path):
    results = run_ranks(push, num_ranks + 8, num_ranks, 8, tmp_path, [1, 2, 3], megabytes, True)
    need = 0
    for worker, (kept, errors) in enumerate(results[num_ranks:]):
        expected = {}
        copies_of(worker, [(name, values_of(name, 3)) for name in SHAPES], expected)
        assert not errors and kept.keys() == expected.keys()
        assert all(torch.equal(torch.from_numpy(kept[name]), values) for name, values in expected.items())
        need += sum(values.nbytes for values in expected.values())
    for sent, taken, _, groups in results[:num_ranks]:
        assert taken == need and sent == need * copies / 4 and groups == 1  # four servers


def push_along_a_chain_that_breaks(folder):
    """Push from one rank to a chain of three servers. In the first push a worker of the second server loses its
    connections."""
    rank, own = dist.get_rank(), device.device()
    group = dist.new_group([0], backend="gloo")
    if rank:
        return serve(rank - 1, folder, 2, own, dies=rank == 3)
    ranks = GroupRanks(0, group)
    transport = PointToPoint(ranks, "float32", TransportSettings(own, 20, 2**-16, relay=True))
    with WeightSync(FileEngine(folder, 3 * PER_SERVER, 20), ranks, "float32", transport) as sync:
        began = time.monotonic()
        with pytest.raises(WeightSyncError) as failed:
            sync.push(held_by(0, 1, 1, own), 1)
        took = time.monotonic() - began
        return str(failed.value), took, sync.push(held_by(0, 1, 2, own), 2).bytes_read, transport.exchange.name


@pytest.mark.skipif(0 < torch.cuda.device_count() < 7, reason="NCCL takes a GPU for each rank and worker")
def test_a_chain_that_breaks_fails_at_once_at_all_its_servers_and_the_next_push_forms_a_new_one(tmp_path):
    (text, took, taken, group), *workers = run_ranks(push_along_a_chain_that_breaks, 7, tmp_path)
    assert re.search("passing .* on to|passed on by", text), text
    assert took < 10 and taken and group == "group2"
    for worker, (kept, _) in enumerate(workers):
        expected = {}
        copies_of(worker, [(name, values_of(name, 2)) for name in SHAPES], expected)
        assert all(torch.equal(torch.from_numpy(kept[name]), values) for name, values in expected.items())
    assert any("on to worker 0 of http://127.0.0.1:8001" in text for text in workers[0][1]), workers[0][1]
    assert any("passed on by worker 0 of http://127.0.0.1:8001" in text for text in workers[4][1]), workers[4][1]


READS = ("get", "multi_get", "check", "wait")


def push_counted(num_ranks: int, folder):
    """Push twice; return the requests to the store that this process made in each push."""
    rank, own, counts = dist.get_rank(), device.device(), []
    group = dist.new_group(range(num_ranks), backend="gloo")
    for verb in READS:
        plain = getattr(dist.TCPStore, verb)
        setattr(dist.TCPStore, verb, lambda *args, plain=plain: (counts.append(1), plain(*args))[1])
    if rank >= num_ranks:
        serve(rank - num_ranks, folder, 2, own)
        return counts
    ranks = GroupRanks(rank, group)
    engine = FileEngine(folder, 2 * PER_SERVER, 20) if rank == 0 else None
    pushes = []
    with WeightSync(engine, ranks, "float32", PointToPoint(ranks, "float32", TransportSettings(own, 20))) as sync:
        for version in (1, 2):
            sync.push(held_by(rank, num_ranks, version, own), version)
            pushes.append(len(counts))
    return pushes


@pytest.mark.skipif(0 < torch.cuda.device_count() < 12, reason="NCCL takes a GPU for each rank and worker")
def test_only_rank_0_reads_the_store_however_many_ranks_there_are(tmp_path):
    results = run_ranks(push_counted, 12, 8, tmp_path)
    assert all(pushes[0] == pushes[1] == 0 for pushes in results[1:8]) and results[0][1] > 0, results[:8]
    for counts in results[8:]:  # a worker: has its boxes, three `put`s, the plan and two decisions
        assert len(counts) <= 12, len(counts)


def push_and_disturb(num_ranks: int, folder, how: str, seconds: float):
    """Push to two workers; worker 0 hangs or dies, or rank 1 fails, during the first push. The second push must
    succeed."""
    rank = dist.get_rank()
    everyone, own = dist.new_group(backend="gloo"), device.device()
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid(), group=everyone)
    group = dist.new_group(range(num_ranks), backend="gloo")
    if rank >= num_ranks:
        return serve(rank - num_ranks, folder, 2, own, dies=how == "worker dies" and rank == num_ranks)
    ranks = GroupRanks(rank, group)
    transport = PointToPoint(ranks, "float32", TransportSettings(own, seconds, 2**-16))
    with WeightSync(
        FileEngine(folder, PER_SERVER, seconds + 3) if rank == 0 else None, ranks, "float32", transport
    ) as sync:
        send, sent = Exchange.send, []

        def disturbed(self, messages):
            sent.append(1)
            if len(sent) == 3 and rank == 1:
                if how == "hang":
                    os.kill(pids[num_ranks], signal.SIGSTOP)
                elif how == "rank fails":
                    raise RuntimeError("no more memory")
            return send(self, messages)

        Exchange.send = disturbed
        began = time.monotonic()
        with pytest.raises(WeightSyncError) as failed:
            sync.push(held_by(rank, num_ranks, 1, own), 1)
        took = time.monotonic() - began
        Exchange.send = send
        if how == "hang" and rank == 1:
            os.kill(pids[num_ranks], signal.SIGCONT)
        dist.barrier(group=group)
        report = sync.push(held_by(rank, num_ranks, 2, own), 2)
        return str(failed.value), took, report.bytes_read, transport.exchange.name


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "hang",
            r"rank \d: sending tensors outside of layers \(embed\) to worker 0 of http://127\.0\.0\.1:8000: timed out "
            r"after 3 s",
        ),
        ("rank fails", r"rank 1: RuntimeError: no more memory"),
        (
            "worker dies",
            r"rank \d: sending .* to worker 0 of http://127\.0\.0\.1:8000: .*Connection (closed|reset) by peer",
        ),
    ],
    ids=["hang", "rank fails", "worker dies"],
)
@pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="NCCL takes a GPU for each rank and worker")
def test_a_rank_or_worker_that_fails_during_a_push_is_named_and_the_next_sync_forms_a_new_group(how, message, tmp_path):
    results = run_ranks(push_and_disturb, 4, 2, tmp_path, how, 3.0)
    for text, took, taken, group in results[:2]:
        assert re.search(message, text) and took < 7 and group == "group2" and taken, text
    for worker, (kept, errors) in enumerate(results[2:]):
        expected = {}
        copies_of(worker, [(name, values_of(name, 2)) for name in SHAPES], expected)
        assert all(torch.equal(torch.from_numpy(kept[name]), values) for name, values in expected.items())
        assert len(errors) == 1 and errors[0].startswith("receiving ")


def push_damaged(num_ranks: int, num_workers: int, folder, how: str):
    """Push twice, the second time without a fault; return the error of the first push."""
    rank, own = dist.get_rank(), device.device()
    group = dist.new_group(range(num_ranks), backend="gloo")
    if rank >= num_ranks:
        return serve(rank - num_ranks, folder, 2, own)
    ranks = GroupRanks(rank, group)
    transport = PointToPoint(ranks, "float32", TransportSettings(own, 20))
    with WeightSync(FileEngine(folder, num_workers, 20) if rank == 0 else None, ranks, "float32", transport) as sync:
        held, send, seen = list(held_by(rank, num_ranks, 1, own)), Exchange.send, []

        def damaging(self, buffers):
            seen.extend(buffers)
            if how == "flipped bit" and rank == 1 and len(seen) == len(buffers):
                buffers[0].values[3] ^= 16
            return send(self, buffers)

        Exchange.send = damaging
        if how == "drifted copy" and rank == 2:
            next(param for name, param, _ in held if name == "layers.1.up")[1, 2] += 1
        with pytest.raises(WeightSyncError) as failed:
            sync.push(held, 1)
        sync.push(held_by(rank, num_ranks, 2, own), 2)
        return str(failed.value)


@pytest.mark.parametrize(
    ("how", "num_ranks", "num_workers", "message"),
    [
        (
            "flipped bit",
            2,
            2,
            r"worker \d: rank 1, (embed|layers\.0\.up)\[.*\]: checksum [0-9a-f]{16} was read; [0-9a-f]{16} was written",
        ),
        (
            "drifted copy",
            4,
            4,
            r"replicas of layer 1 on ranks 0, 2 differ: worker 0 of http\S+ and worker 0 of http\S+ received different "
            r"values",
        ),
    ],
    ids=["flipped bit", "drifted copy"],
)
@pytest.mark.skipif(0 < torch.cuda.device_count() < 8, reason="NCCL takes a GPU for each rank and worker")
def test_what_changed_on_the_way_and_copies_that_differ_are_named_with_rank_and_tensor(
    how, num_ranks, num_workers, message, tmp_path
):
    results = run_ranks(push_damaged, num_ranks + num_workers, num_ranks, num_workers, tmp_path, how)
    assert all(re.search(message, text) for text in results[:num_ranks]), results[0]
    for worker, (kept, _) in enumerate(results[num_ranks:]):
        expected = {}
        copies_of(worker, [(name, values_of(name, 2)) for name in SHAPES], expected)
        assert all(torch.equal(torch.from_numpy(kept[name]), values) for name, values in expected.items())


def push_to_fewer(num_ranks: int, folder):
    """Push to two servers, then to the second of them alone."""
    rank, own = dist.get_rank(), device.device()
    group = dist.new_group(range(num_ranks), backend="gloo")
    if rank >= num_ranks:
        worker = rank - num_ranks
        return serve(worker, folder, 1 if worker < PER_SERVER else 2, own, gone=PER_SERVER)
    ranks = GroupRanks(rank, group)
    transport = PointToPoint(ranks, "float32", TransportSettings(own, 20))
    engine = FileEngine(folder, 2 * PER_SERVER, 20) if rank == 0 else None
    with WeightSync(engine, ranks, "float32", transport) as sync:
        sync.push(held_by(rank, num_ranks, 1, own), 1)
        if engine is not None:
            engine.servers.pop(next(iter(engine.servers)))
        sync.push(held_by(rank, num_ranks, 2, own), 2)
        return (
            [key for key in transport.store.tcp_store.list_keys() if "update1/" in key] if engine is not None else None
        )


@pytest.mark.skipif(0 < torch.cuda.device_count() < 6, reason="NCCL takes a GPU for each rank and worker")
def test_a_server_that_is_gone_leaves_a_group_in_which_workers_have_other_numbers(tmp_path):
    results = run_ranks(push_to_fewer, 6, 2, tmp_path)
    assert results[0] == []
    for worker, (kept, errors) in enumerate(results[2:]):
        expected, version = {}, 1 if worker < PER_SERVER else 2
        copies_of(worker, [(name, values_of(name, version)) for name in SHAPES], expected)
        assert not errors and all(
            torch.equal(torch.from_numpy(kept[name]), values) for name, values in expected.items()
        )


def push_to_nobody(folder):
    ranks = GroupRanks(dist.get_rank(), dist.group.WORLD)
    engine = FileEngine(folder, PER_SERVER, 20) if ranks.world_rank == 0 else None
    with WeightSync(
        engine, ranks, "float32", PointToPoint(ranks, "float32", TransportSettings(device.device(), 20))
    ) as sync:
        if engine:
            engine.gone = True
        began = time.monotonic()
        with pytest.raises(WeightSyncError) as failed:
            sync.push(held_by(ranks.world_rank, 2, 1, device.device()), 1)
        return str(failed.value), time.monotonic() - began


def test_a_server_that_died_before_it_said_anything_is_not_waited_for(tmp_path):
    for text, seconds in run_ranks(push_to_nobody, 2, tmp_path):
        assert (
            "waiting for worker 0 of http://127.0.0.1:8000: the servers have finished without it" in text
            and seconds < 10
        )
