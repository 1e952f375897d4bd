"""Weight sync to colocated servers on several nodes: each node's files hold the whole model, written by the ranks of
that node."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import tiny_model

from megagrpo.config import ParallelSection
from megagrpo.families.shared.boxes import size
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.proof.verify.verified_step import fill_weights
from megagrpo.sync.trainer_side.node_shares import Nodes, share_out
from megagrpo.sync.trainer_side.shared_memory import FileUpdate, SharedMemory
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import SendReport, TransportSettings
from megagrpo.sync.vllm_side.memory_receiver import MappedBlocks, SharedFiles
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.wire.progress_file import ProgressReader
from megagrpo.types import WeightSyncError
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.slices.tensor_index import TensorIndex

RANKS = 4
NODES = Nodes((0, 0, 1, 1), {"near": 0, "far": 1})


class Readers:
    """Two servers of one worker, which read every tensor whole: one on the node of rank 0, one on the other node."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.ranks: dict[str, set[int]] = {}
        self.folders: dict[str, Path] = {}

    def load_weights(self, update: FileUpdate, only: None = None) -> list[dict]:
        return [self.read(update, server) for server in NODES.servers]

    def read(self, update: FileUpdate, server: str) -> dict:
        order = update.request(server)
        found, self.folders[server] = (
            TensorIndex.load(order["index"], update.index.version),
            Path(order["index"]).parent,
        )
        reader = ShardReader(MappedBlocks(found, 0, SharedFiles(), ProgressReader(self.folders[server], found.version)))
        self.tensors[server] = {name: reader.fetch(name, lazy).clone() for name, lazy in reader.tensors()}
        self.ranks[server] = {block.rank for tensor in found.tensors.values() for block in tensor.blocks}
        assert (update.reports(server) is None) == (server == "far") and Path(
            order["replies"]
        ).parent.parent == self.folders[server]
        reads = [(name, index, part, total) for (name, index, part), total in reader.reads.items()]
        return {
            "server": server,
            "worker": 0,
            "version": found.version,
            "bytes": reader.bytes,
            "checksum_seconds": 0.0,
            "reads": reads,
        }

    def resume(self, update: FileUpdate, only: None = None) -> None:
        self.update = update


def push(sizes: dict, shared: Path):
    layout = init_layout(ParallelSection(**sizes))
    hf_config = tiny_model("llama_tied")
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False))
    fill_weights(SimpleNamespace(chunks=chunks), hf_config, layout)
    engine = Readers() if layout.world_rank == 0 else None
    own = shared / str(NODES.of_ranks[layout.world_rank])
    transport = SharedMemory(layout, "float32", TransportSettings(nodes=NODES), folder=own)
    with WeightSync(engine, layout, "float32", transport) as sync:
        for version in (1, 2):
            sync.push(blocks(chunks, hf_config, layout), version)
        crossings = None if engine is None else refused(engine.update)
    layout.close()
    return None if engine is None else (engine.tensors, engine.ranks, engine.folders, crossings)


def refused(update: FileUpdate) -> list[str]:
    """The errors of an update in which one block at a time changes between two nodes."""
    errors, num_ranks = [], len(NODES.of_ranks)
    for one, left, arrived in update.crossings[:3]:
        wrong = [[0] * (1 + max(left, arrived)) for _ in range(num_ranks)]
        wrong[one.receiver][arrived] += 1
        with pytest.raises(WeightSyncError) as error:
            replace(update, crossings=[(one, left, arrived)]).verify(
                [SendReport(0, 0.0, tuple(checksums)) for checksums in wrong], []
            )
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize(
    "sizes", usual([dict(tp=2), dict(pp=2), dict(tp=2, pp=2, pipeline_layers=[1, 3]), dict(cp=2)], 2, 3), ids=str
)
def test_the_servers_of_each_node_read_the_whole_model_from_the_ranks_of_their_node(sizes, tmp_path):
    tensors, ranks, folders, said = run_ranks(push, RANKS, sizes, tmp_path)[0]
    assert ranks == {"near": {0, 1}, "far": {2, 3}} and {
        url: folder.parent.name for url, folder in folders.items()
    } == {
        "near": "0",
        "far": "1",
    }
    for server in NODES.servers:
        assert len(tensors[server]) == 2 + 9 * tiny_model("llama_tied").num_layers
        assert all(
            torch.equal(values, random_tensor(name, values.shape)) for name, values in tensors[server].items()
        ), server
    assert len(said) == (3 if sizes.get("pp") else 0)  # with stages on different nodes every weight crosses once
    assert all("changed on its way from rank" in text for text in said)
    assert not any(os.listdir(tmp_path / node) for node in "01")


def test_a_node_without_a_block_gets_it_once_and_its_ranks_share_the_work():
    keys = [(f"layers.{layer}.w", (8,), ((0,), (8,))) for layer in range(4)]
    held = [
        [(key, 8) for key in keys[:2]],
        [(key, 8) for key in keys[:2]],
        [(key, 8) for key in keys[2:]],
        [(key, 8) for key in keys[2:]],
    ]
    shares = share_out(held, NODES.of_ranks)
    assert [(one.key, one.sender // 2, one.receiver // 2) for one in shares.transfers] == [
        *((key, 0, 1) for key in keys[:2]),
        *((key, 1, 0) for key in keys[2:]),
    ]
    written = [sum(size(key[2]) for key in keys if rank in shares.writer[key]) for rank in range(RANKS)]
    received = [sum(one.receiver == rank for one in shares.transfers) for rank in range(RANKS)]
    assert written == [8, 8, 8, 8] and received == [1, 1, 1, 1]
    assert share_out(held, (0,) * RANKS).transfers == []
