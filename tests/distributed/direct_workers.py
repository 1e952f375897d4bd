"""Trainer ranks and workers in one world of forks, without vLLM: the first ranks push weights, the others receive them
as workers do."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import cut, whole
from megagrpo.platform.rendezvous.store_exchange import Deadline, clear_frames
from megagrpo.sync.vllm_side.p2p_receiver import P2pReceiver
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.vllm_side.receiver import BlankBlocks, BoxCounts, Worker
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import TensorIndex

SHAPES = {"embed": (12, 6), "norm": (6,)}
for layer in range(3):
    SHAPES |= {f"layers.{layer}.up": (8, 6), f"layers.{layer}.down": (6, 8), f"layers.{layer}.norm": (6,)}
PER_SERVER = 2  # workers


def values_of(name: str, version: int) -> Tensor:
    """The weights of a version."""
    shape = SHAPES[name]
    return (
        torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        + 1000 * list(SHAPES).index(name)
        + 0.5 * version
    )


def held_by(rank: int, num_ranks: int, version: int, device: torch.device):
    """Two tensor-parallel halves in the form of `megagrpo.weights.blocks.parameter_blocks.blocks`; ranks beyond the
    second hold copies."""
    half = rank % 2 if num_ranks > 1 else None
    for name, shape in SHAPES.items():
        box = cut(shape, 0, 0, shape[0])
        if half is not None and len(shape) == 2:
            dim = 1 if name.endswith("down") else 0
            n = shape[dim] // 2
            box = cut(shape, dim, n * half, n * half + n)
        held = values_of(name, version)[tuple(map(slice, *box))].contiguous().to(device)
        yield name, held, [Block(name, shape, box, tuple(held.shape), axis=0, at=0, count=held.shape[0])]


def copies_of(worker: int, tensors: dict[str, Tensor], kept: dict[str, Tensor]) -> None:
    """Read tensors like a worker's loaders: rows of `up`, columns of `down`, the rest whole, and norms twice."""
    half = worker % PER_SERVER
    for name, tensor in tensors:
        dim = 1 if name.endswith("down") else 0
        part = (
            tensor.narrow(dim, tensor.shape[dim] // 2 * half, tensor.shape[dim] // 2)
            if name.endswith(("up", "down"))
            else tensor
        )
        for _ in range(2 if name.endswith("norm") else 1):
            kept[name] = torch.empty(part.shape)
            kept[name].copy_(part)


class FileEngine:
    """Servers of PER_SERVER workers each, which get requests through files."""

    def __init__(self, folder: Path, num_workers: int, seconds: float):
        self.folder, self.seconds, self.gone = folder, seconds, False
        self.servers = {f"http://127.0.0.1:{8000 + i}": PER_SERVER for i in range(num_workers // PER_SERVER)}
        self.version = 0

    def workers(self) -> dict[str, int]:
        return self.servers

    def load_weights(self, update) -> list[dict]:
        if self.gone:  # as `VllmEngine` excludes dead servers
            return []
        for server in self.servers:
            asked = update.request(server)
            request = json.dumps({"version": update.index.version, "request": asked})
            for worker in range(PER_SERVER):
                place = self.folder / f"request{asked['first_worker'] + worker}"
                place.with_suffix(".part").write_text(request)
                os.replace(place.with_suffix(".part"), place)
        deadline = Deadline(self.seconds)
        found: dict[str, list[dict]] = {}
        while not deadline.passed:
            found = {server: update.reports(server) for server in self.servers}
            told = [reply for replies in found.values() for reply in replies]
            if errors := [f"worker {reply['worker']}: {reply['error']}" for reply in told if "error" in reply]:
                raise WeightSyncError("; ".join(errors))
            if all(len(replies) == PER_SERVER for replies in found.values()):
                return [reply | {"server": server} for server, replies in found.items() for reply in replies]
            time.sleep(0.01)
        raise WeightSyncError(f"a worker did not answer within {self.seconds:g} s")

    def resume(self, update) -> None:
        self.version = update.index.version


def serve(
    worker: int, folder: Path, updates: int, device: torch.device, dies: bool = False, gone: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """Run a worker; return its weights and errors. A worker that `dies` loses its connections during the first update,
    sends no error, and is back for the next. After the first update `gone` workers before this one no longer exist."""
    kept, errors = {}, []
    number = worker % PER_SERVER

    def dry_run(index: TensorIndex) -> BoxCounts:
        reader = ShardReader(BlankBlocks(index))
        copies_of(worker, reader.tensors(), {})
        return reader.fetched

    receiver = P2pReceiver(Worker(number, device, dry_run))
    for update in range(updates):
        request = folder / f"request{worker - gone * (update > 0)}"
        while not request.exists():
            time.sleep(0.005)
        info = json.loads(request.read_text())
        request.unlink()
        try:
            source = receiver.open(info["request"], info["version"])
            if dies and update == 0:
                source.values("embed", *source.parts("embed", whole(SHAPES["embed"]))[0])
                receiver.close()
                errors.append("receiving no more")
                continue
            reader = ShardReader(source)
            copies_of(worker, reader.tensors(), kept)
            source.drain()
            assert not source.arrived and not source.in_flight
            told = {"worker": number, "version": info["version"], "bytes": reader.bytes}
            receiver.report(told | source.proof(reader.reads))
        except WeightSyncError as error:
            errors.append(str(error))
            clear_frames(error)
            receiver.abort()
            receiver.report({"worker": number, "error": str(error)})
    return {name: tensor.numpy() for name, tensor in kept.items()}, errors
