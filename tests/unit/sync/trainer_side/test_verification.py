"""The trainer's checks after a weight update, and the lifetime of its files in shared memory."""

import os
from pathlib import Path

import pytest
import torch

from megagrpo.config import LoraSection
from megagrpo.engine.http.protocol import ServerDied
from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import cut, whole
from megagrpo.sync.trainer_side import adapter_sync
from megagrpo.sync.trainer_side.shared_buffers import allocate
from megagrpo.sync.trainer_side.shared_memory import SharedMemory
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import Handover
from megagrpo.sync.trainer_side.verification import verify
from megagrpo.sync.wire.copy_checksums import checksum
from megagrpo.sync.wire.progress_file import ProgressReader
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import SharedBlock, SharedTensor, TensorIndex
from tests.rank_fakes import OneRank

BLOCKS = tuple(SharedBlock(rank, f"f{rank}", 0, cut((8, 6), 0, 4 * rank, 4 * rank + 4), number=0) for rank in range(2))
WRITTEN = {("w", 0): 10, ("w", 1): 11}
INDEX = TensorIndex(5, "float32", {"w": SharedTensor((8, 6), BLOCKS)})


def report(reads, worker=0, version=5):
    return {"server": "http://a", "worker": worker, "version": version, "bytes": 0, "reads": reads}


def test_workers_that_read_disjoint_slices_with_the_right_sums_pass():
    halves = [
        report([["w", 0, cut((8, 6), 0, 0, 4), 10], ["w", 1, cut((8, 6), 0, 4, 6), 5]]),
        report([["w", 1, ((6, 0), (8, 6)), 6]], 1),
    ]
    verify(INDEX, WRITTEN, halves)


def test_workers_that_read_the_same_slices_pass():
    reads = [["w", 0, cut((8, 6), 0, 0, 4), 10], ["w", 1, cut((8, 6), 0, 4, 8), 11]]
    verify(INDEX, WRITTEN, [report(reads), report(reads, worker=1)])


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([report([["w", 0, cut((8, 6), 0, 0, 4), 10]])], r"http://a: no worker read w\[4:8, 0:6\]"),
        (
            [report([["w", 0, cut((8, 6), 0, 0, 4), 10], ["w", 1, cut((8, 6), 0, 4, 8), 12]])],
            r"rank 1, w\[4:8, 0:6\]: checksum",
        ),
        (
            [
                report(
                    [["w", 0, ((0, 0), (4, 3)), 4], ["w", 0, ((0, 3), (4, 6)), 7], ["w", 1, cut((8, 6), 0, 4, 8), 11]]
                )
            ],
            r"rank 0, w\[0:4",
        ),
        ([report([], version=4)], "worker 0 reports weight version 4; 5 was sent"),
        (
            [report([["w", 0, cut((8, 6), 0, 0, 4), 10]]), report([["w", 0, cut((8, 6), 0, 0, 4), 9]], worker=1)],
            r"worker 1: w\[0:4, 0:6\] changed",
        ),
    ],
)
def test_what_was_not_read_or_not_as_written_is_named(reports, message):
    with pytest.raises(WeightSyncError, match=message):
        verify(INDEX, WRITTEN, reports)


def columns(lo, hi):
    """A part of the first block."""
    return cut((4, 6), 1, lo, hi)


@pytest.mark.parametrize(
    "read",
    [
        {columns(0, 3): 2**64 - 1, columns(3, 6): 11},
        {columns(0, 4): 1, columns(2, 6): 2},
        {columns(0, 6): 10, columns(0, 1): 3},
    ],
    ids=["sums modulo 2^64", "overlapping", "whole and a part"],
)
def test_other_slices_of_a_block_pass_with_the_same_sum_or_where_they_overlap(read):
    reads = [["w", 0, box, total] for box, total in read.items()] + [["w", 1, BLOCKS[1].box, 11]]
    verify(INDEX, WRITTEN, [report(reads)])


def test_a_second_server_must_have_read_everything_too():
    reads = [["w", 0, cut((8, 6), 0, 0, 4), 10], ["w", 1, cut((8, 6), 0, 4, 8), 11]]
    with pytest.raises(WeightSyncError, match="http://b: no worker read w"):
        verify(INDEX, WRITTEN, [report(reads), report(reads[:1]) | {"server": "http://b"}])


def whole_block(name, shape):
    """A parameter that is a whole tensor."""
    return Block(name, shape, whole(shape), grid=shape, axis=0, at=0, count=shape[0])


class ReadingEngine:
    """Reads the tensor_index like a worker and reports it; keeps the tensors."""

    def load_weights(self, update, only=None):
        told = update.request("s")
        loaded, progress = (
            TensorIndex.load(told["index"], update.index.version),
            ProgressReader(update.folder, update.index.version),
        )
        self.seen, reads = {}, []
        for name, tensor in loaded.tensors.items():
            for index, block in enumerate(tensor.blocks):
                progress.wait_for(block.rank, block.offset + 1, name)
                data = Path(block.file).read_bytes()[block.offset :]
                self.seen[name] = torch.frombuffer(bytearray(data), dtype=torch.float32)[: whole(tensor.shape)[1][0]]
                reads.append([name, index, block.box, checksum(self.seen[name])])
        return [
            {"server": "s", "worker": 0, "version": loaded.version, "bytes": 1, "checksum_seconds": 0.0, "reads": reads}
        ]

    def resume(self, update, only=None):
        self.version = update.index.version


def test_a_push_writes_what_the_parameters_hold_now_and_close_removes_it(tmp_path):
    params = {"a": torch.randn(5), "b": torch.randn(7)}
    engine = ReadingEngine()
    with WeightSync(engine, OneRank(), "float32", SharedMemory(OneRank(), "float32", folder=tmp_path)) as sync:
        for version in (1, 2, 3):
            params["a"] += 1
            done = sync.push(
                [(name, param, [whole_block(name, tuple(param.shape))]) for name, param in params.items()], version
            )
            assert (engine.version, done.weight_version, done.bytes_published) == (version, version, 48)
            for name, param in params.items():
                assert torch.equal(engine.seen[name], param)
    assert list(tmp_path.iterdir()) == []


def noting_handover() -> tuple[Handover, list[str]]:
    """Records the calls of a sync on the trainer, among the calls on its engine."""
    noted = []
    return Handover(lambda: noted.append("trainer loads weights"), lambda: noted.append("trainer leaves")), noted


def test_a_trainer_leaves_its_memory_when_all_is_verified_and_before_the_engine_serves(tmp_path):
    class DiesOnce(ReadingEngine):
        def load_weights(self, update, only=None):
            noted.append("engine loads")
            return super().load_weights(update, only)

        def resume(self, update, only=None):
            noted.append("engine serves")
            if len(noted) < 5:
                raise ServerDied("http://s is gone")

    (handover, noted), param = noting_handover(), torch.ones(5)
    with WeightSync(DiesOnce(), OneRank(), "float32", SharedMemory(OneRank(), "float32", folder=tmp_path)) as sync:
        sync.push([("p", param, [whole_block("hf.w", (5,))])], 1, handover)
        once = ["trainer loads weights", "engine loads", "trainer leaves", "engine serves"]
        assert noted == [*once, *once]
        noted.clear()
        param[0] = torch.nan
        with pytest.raises(WeightSyncError, match="NaN"):
            sync.push([("p", param, [whole_block("hf.w", (5,))])], 2, handover)
        assert noted == ["trainer loads weights"]


def test_an_adapter_is_written_before_the_trainer_leaves_and_then_loaded(monkeypatch):
    handover, noted = noting_handover()
    monkeypatch.setattr(adapter_sync, "save_adapter", lambda *args: noted.append("the adapter is written"))
    monkeypatch.setattr(
        adapter_sync.AdapterSync, "_deliver_adapter", lambda *args: noted.append("engine loads") or (1, 1)
    )
    with adapter_sync.AdapterSync(ReadingEngine(), OneRank(), "float32", LoraSection(rank=2), "base") as sync:
        sync.push([], 1, handover)
    assert noted == ["trainer loads weights", "the adapter is written", "trainer leaves", "engine loads"]


def test_a_server_that_returns_gets_the_newest_adapter_that_the_engine_uses(monkeypatch):
    class Engine:
        loaded, weight_version, fails = [], 0, False

        def load_adapter(self, folder, version, sums, here, only=None):
            if self.fails:
                raise ServerDied("http://s is gone")
            self.loaded.append((folder.name, version, only))
            return 1

        def use_adapter(self, version):
            self.weight_version = version

        def oldest_adapter(self, version):
            return version

    monkeypatch.setattr(adapter_sync, "save_adapter", lambda blocks, layout, sources, folder, *more: folder.mkdir())
    engine = Engine()
    with adapter_sync.AdapterSync(engine, OneRank(), "float32", LoraSection(rank=2), "base") as sync:
        assert sync.load_last("http://s") == 0 and engine.loaded == []  # before the first push
        for version in (1, 2):
            sync.push([], version)
            assert sync.load_last("http://s") == version
        engine.fails = True
        with pytest.raises(WeightSyncError, match="weight version 3 did not reach the engine"):
            sync.push([], 3)
        engine.fails = False
        assert sync.load_last("http://s") == 2
    last = ["http://s"]
    assert engine.loaded == [
        *(("adapter1", 1, None), ("adapter1", 1, last)),
        *(("adapter2", 2, None), ("adapter2", 2, last), ("adapter2", 2, last)),
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_not_sent(tmp_path, bad):
    param = torch.zeros(5)
    param[3] = bad
    with WeightSync(
        ReadingEngine(), OneRank(), "bfloat16", SharedMemory(OneRank(), "bfloat16", folder=tmp_path)
    ) as sync:
        with pytest.raises(WeightSyncError, match=r"rank 0: parameter p holds NaN or infinity in its part of hf.w"):
            sync.push([("p", param, [whole_block("hf.w", (5,))])], 1)


def test_ranks_on_two_hosts_are_refused(tmp_path):
    class Two(OneRank):
        def all_gather_objects(self, obj, within=None):
            return [obj, ("elsewhere", *obj[1:])]

    with pytest.raises(ValueError, match=r"all ranks on one host; they are on .*elsewhere"):
        SharedMemory(Two(), "float32", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_that_cannot_be_written_to_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"rollout\.weight_sync_transport: .*/file cannot be written to: File exists"):
        SharedMemory(OneRank(), "float32", folder=tmp_path / "file")


def test_shared_memory_that_is_too_small_is_a_clear_error():
    # Linux refuses at once to reserve more than the whole file system, so this test fills nothing.
    held = os.statvfs("/dev/shm")
    folder = Path(f"/dev/shm/test_full_{os.getpid()}")
    try:
        with pytest.raises(
            WeightSyncError,
            match=r"/dev/shm is full: a slot of this rank's weights takes \d+ MiB, \d+ MiB are free; enlarge",
        ):
            allocate(folder / "slot", held.f_blocks * held.f_frsize + 4096)
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()
