"""Weights through GPU memory that a worker maps, with real processes. Without a GPU a file replaces the GPU memory, so
only CUDA's part is not tested."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from direct_workers import PER_SERVER, SHAPES, copies_of, held_by, values_of
from ranks import run_ranks

from megagrpo.engine.http.protocol import ServerDied
from megagrpo.platform import device
from megagrpo.sync.trainer_side import cuda_ipc as trainer
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings
from megagrpo.sync.vllm_side.memory_receiver import MappedBlocks
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.wire import cuda_handles as worker
from megagrpo.sync.wire.progress_file import ProgressReader
from megagrpo.weights.slices.tensor_index import TensorIndex
from tests.rank_fakes import OneRank

SERVER = "http://127.0.0.1:8000"


def stand_in(folder) -> None:
    """Without a GPU: buffers are files, handles contain the number of bytes, and a process with a handle maps the
    file."""
    if device.has_gpu():
        return
    path = folder / "memory"

    def buffer(self, slot):
        path.touch()
        name = f"gpu of rank {self.rank}"
        if name not in self.buffers:
            self.buffers[name] = torch.from_file(str(path), shared=True, size=self.size, dtype=torch.uint8)
        return name, self.buffers[name]

    trainer.DeviceSlots.buffer = buffer
    trainer.export = lambda buffer: worker.pack(
        buffer.numel(), (b"handle", buffer.numel(), 0, False, b"counter", 0, b"event", True)
    )
    worker.rebuild_cuda_tensor = lambda kind, size, *rest: torch.from_file(
        str(path), shared=True, size=size[0], dtype=torch.uint8
    )
    torch.cuda.ipc_collect = lambda: None


class OneWorker:
    """A server of one worker in another process, which gets requests through a file. The worker dies in the first
    update before it reads."""

    def __init__(self, folder):
        self.folder, self.died = folder, False

    def workers(self):
        return {SERVER: 1}

    def load_weights(self, update):
        if not self.died:
            self.died = bool(update.request(SERVER)["handles"])
            raise ServerDied(f"{SERVER} is gone")
        request = update.request(SERVER) | {"version": update.index.version}
        (self.folder / "draft").write_text(json.dumps(request))
        (self.folder / "draft").rename(self.folder / "request")
        while not (replies := update.reports(SERVER)):
            time.sleep(0.01)
        return [reply | {"server": SERVER} for reply in replies]

    def resume(self, update):
        self.version = update.index.version


def take(folder, updates: int) -> list[dict]:
    """The worker: copies both halves of the announced tensors, mapped from the other process's memory."""
    kept = {}
    for _ in range(updates):
        while not (folder / "request").exists():
            time.sleep(0.01)
        told = json.loads((folder / "request").read_text())
        (folder / "request").unlink()
        tensor_index = TensorIndex.load(told["index"], told["version"])
        maps = worker.DeviceMaps({name: handles[0] for name, handles in told["handles"].items()}, device.device())
        reader = ShardReader(
            MappedBlocks(tensor_index, 0, maps, ProgressReader(Path(told["index"]).parent, tensor_index.version)),
        )
        for half in range(PER_SERVER):
            copies_of(half, reader.tensors(), kept.setdefault(half, {}))
        reads = [[name, index, part, total] for (name, index, part), total in reader.reads.items()]
        reader.source.release()
        report = {
            "worker": 0,
            "version": tensor_index.version,
            "bytes": reader.bytes,
            "reads": reads,
            "checksum_seconds": 0.0,
        }
        (folder / "reply").write_text(json.dumps(report))
        (folder / "reply").rename(f"{told['replies']}/worker0.json")
    return [{name: tensor.numpy() for name, tensor in half.items()} for half in kept.values()]


def push(folder):
    stand_in(folder)
    if dist.get_rank() == 1:
        return take(folder, 2)
    engine, said = OneWorker(folder), []
    transport = trainer.CudaIpc(OneRank(), "float32", TransportSettings(device.device()), folder=folder)
    with WeightSync(engine, OneRank(), "float32", transport, said.append) as sync:
        for version in (1, 2):
            sync.push(held_by(0, 1, version, device.device()), version)
        assert not sync.load_last(SERVER)  # a server that is back waits for the next sync
    return engine.version, said


def test_a_worker_copies_from_memory_of_another_process_once_its_server_is_back(tmp_path):
    (version, said), kept = run_ranks(push, 2, tmp_path)
    assert (
        version == 2 and len(said) == 1 and "restarting the sync: weight version 1 did not reach the engine" in said[0]
    )
    assert len(kept) == PER_SERVER
    for number, half in enumerate(kept):
        expected = {}
        copies_of(number, [(name, values_of(name, 2)) for name in SHAPES], expected)
        assert all(torch.equal(torch.from_numpy(half[name]), values) for name, values in expected.items())
