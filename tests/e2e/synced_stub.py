"""A stub of a vLLM server for whole runs: `benchmarks.stub_engine` without a model, which also takes weights as one
worker of vLLM does, through the package's own receiver and reader. Real HTTP, in a fork of pytest's process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

from benchmarks.stub_engine import Behavior, Connection, Engine, Entries
from megagrpo.sync.vllm_side.memory_receiver import MemoryReceiver
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.vllm_side.receiver import Worker


class Weights:
    """The weights of a worker. `tensors` holds all tensors of the last update."""

    def __init__(self) -> None:
        self.receiver = MemoryReceiver(Worker(0, torch.device("cpu"), lambda index: Counter()))
        self.tensors: dict[str, torch.Tensor] = {}
        self.reader: ShardReader | None = None

    def update(self, info: dict[str, Any]) -> None:
        """Read every tensor whole. `info` is the body of vLLM's `/update_weights`."""
        source = self.receiver.open(info["request"], info["version"])
        self.reader = ShardReader(source, self.receiver.note)
        for name, tensor in self.reader.tensors():
            self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.tensors[name].copy_(tensor)
        source.drain()
        self.reader.check_reads()

    def finish(self) -> None:
        """Report to the trainer which slices were read, with their checksums."""
        if self.reader is not None:
            told = {"worker": 0, "version": self.reader.index.version, "bytes": self.reader.bytes}
            self.receiver.report(told | self.reader.source.proof(self.reader.reads))
            self.reader.source.release()
            self.reader = None


class SyncedConnection(Connection):
    """A connection whose requests also update the weights."""

    def __init__(self, engine: Engine, weights: Weights):
        super().__init__(engine)
        self._weights = weights

    async def _answer(self, target: str, body: bytes) -> None:
        if target == "/update_weights":
            await asyncio.to_thread(self._weights.update, json.loads(body)["update_info"])
        elif target == "/finish_weight_update":
            self._weights.finish()
        await super()._answer(target, body)


class SyncedStub:
    """A server on its own port, whose responses have tokens of `vocabulary`. A context manager; `url` is its
    address."""

    def __init__(self, behavior: Behavior, vocabulary: Sequence[int]):
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(there, behavior, vocabulary), daemon=True)
        with warnings.catch_warnings():  # torch keeps two idle helper threads from its import; the stub needs none
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        self.url = here.recv()

    def __enter__(self) -> SyncedStub:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(told: Pipe, behavior: Behavior, vocabulary: Sequence[int]) -> None:
    engine, weights = Engine(behavior), Weights()
    engine.entries = Entries(vocabulary)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: SyncedConnection(engine, weights), "127.0.0.1", 0, backlog=1024)
        told.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    asyncio.run(serve())
