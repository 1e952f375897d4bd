"""Ranks with the same weights share the work of a weight sync: each element is sent once, in every layout."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_waits import HostWaits
from ranks import run_ranks
from tiny_policy import tiny_model

from megagrpo.config import ParallelSection
from megagrpo.families.shared.blocks import Local, same
from megagrpo.families.shared.boxes import size
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.proof.verify.verified_step import fill_weights
from megagrpo.sync.trainer_side import shared_buffers as slots
from megagrpo.sync.trainer_side.shared_memory import FileUpdate, SharedMemory
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.vllm_side import reader
from megagrpo.sync.vllm_side.memory_receiver import MappedBlocks, SharedFiles
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.wire import copy_checksums
from megagrpo.sync.wire.progress_file import ProgressReader
from megagrpo.types import WeightSyncError
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.slices.tensor_index import TensorIndex
from tests.rank_fakes import OneRank


class OneReader:
    """An engine of one worker that reads every tensor whole and keeps it."""

    def load_weights(self, update: FileUpdate, only: None = None) -> list[dict]:
        told = update.request("here")
        found = TensorIndex.load(told["index"], update.index.version)
        shards = ShardReader(MappedBlocks(found, 0, SharedFiles(), ProgressReader(update.folder, found.version)))
        self.tensors = {name: shards.fetch(name, lazy).clone() for name, lazy in shards.tensors()}
        self.sent = Counter()
        for tensor in found.tensors.values():
            for block in tensor.blocks:
                self.sent[block.rank] += size(block.box)
        reads = [(name, index, part, total) for (name, index, part), total in shards.reads.items()]
        return [
            {
                "server": "here",
                "worker": 0,
                "version": found.version,
                "bytes": shards.bytes,
                "checksum_seconds": 0.0,
                "reads": reads,
            }
        ]

    def resume(self, update, only: None = None) -> None:
        self.version = update.index.version


def push(sizes: dict, shared: Path):
    layout = init_layout(ParallelSection(**sizes))
    hf_config = tiny_model("llama_tied")
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False))
    fill_weights(SimpleNamespace(chunks=chunks), hf_config, layout)
    engine = OneReader() if layout.world_rank == 0 else None
    with WeightSync(engine, layout, "float32", SharedMemory(layout, "float32", folder=shared)) as sync:
        sync.push(blocks(chunks, hf_config, layout), 1)
    layout.close()
    return None if engine is None else ({name: t.numpy() for name, t in engine.tensors.items()}, dict(engine.sent))


@pytest.mark.parametrize("sizes", [dict(cp=2), dict(cp=2, tp=2), dict(cp=2, pp=2, pipeline_layers=[1, 3])], ids=str)
def test_context_parallel_ranks_send_each_element_once_and_share_the_sending(sizes, tmp_path):
    ranks = ParallelSection(**sizes).model_parallel_size
    tensors, sent = run_ranks(push, ranks, sizes, tmp_path)[0]
    assert len(tensors) == 2 + 9 * tiny_model("llama_tied").num_layers
    for name, values in tensors.items():
        assert torch.equal(torch.from_numpy(values), random_tensor(name, values.shape)), name
    assert sum(sent.values()) == sum(values.size for values in tensors.values())
    pairs = [(rank, rank + sizes.get("tp", 1)) for rank in range(ranks) if rank // sizes.get("tp", 1) % 2 == 0]
    for one, other in pairs:  # these hold the same weights
        assert 0.4 < sent[one] / (sent[one] + sent[other]) < 0.6
    assert not os.listdir(tmp_path)


def test_what_an_engine_in_bfloat16_keeps_in_float32_arrives_to_the_last_bit(tmp_path):
    name, scale = (
        "model.layers.3.mlp.gate.e_score_correction_bias",
        torch.tensor([1e-30, 1e-3, 1.0, 14.0, 1e30]).repeat_interleave(99),
    )
    bias = scale * (1 + torch.rand(495, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(bias.bfloat16().float(), bias)
    (block,) = same(name).blocks(Local(bias, 1, 0, None))
    engine, alone = OneReader(), OneRank()
    for dtype in ("bfloat16", "float32"):
        with WeightSync(engine, alone, dtype, SharedMemory(alone, dtype, folder=tmp_path)) as sync:
            sync.push([("router.expert_bias", bias, [block])], 1)
        assert engine.tensors[name].dtype == torch.float32 and torch.equal(engine.tensors[name], bias)


def test_weights_on_a_gpu_cost_a_few_transfers_per_layer_and_none_per_slice(tmp_path, monkeypatch):
    """Every tensor counts as a GPU's, so trainer and worker take the paths of GPUs."""
    for module in (copy_checksums, reader, slots):
        monkeypatch.setattr(module, "is_host", lambda values: False)
    layers, per_layer, mode, by_worker, stock = 5, 7, HostWaits(), [], reader.on_host
    # runs in a thread without the mode
    monkeypatch.setattr(reader, "on_host", lambda sums: by_worker.append(len(sums)) or stock(sums))
    names = [f"model.layers.{layer}.tensor{i}" for layer in range(layers) for i in range(per_layer)]
    held = [(name, torch.randn(8, 3)) for name in names]
    engine, alone = OneReader(), OneRank()
    with mode, WeightSync(engine, alone, "bfloat16", SharedMemory(alone, "bfloat16", folder=tmp_path)) as sync:
        mode.mark([values for _, values in held])
        with mode.counting("sync"):
            sync.push([(name, values, list(same(name).blocks(Local(values, 1, 0, None)))) for name, values in held], 1)
    assert all(torch.equal(engine.tensors[name], values.bfloat16()) for name, values in held)
    assert {wait.split(" at ")[0] for wait in mode.waits["sync"]} == {"tolist"}
    assert mode.waits["sync"].total() == 1 + layers  # the check for NaN, and the sums of each layer
    assert [count for count in by_worker if count] == [per_layer] * layers


def test_a_wrong_checksum_on_a_gpu_names_the_tensor_after_its_layer(tmp_path, monkeypatch):
    for module in (copy_checksums, reader, slots):
        monkeypatch.setattr(module, "is_host", lambda values: False)
    name, stock = "model.layers.3.tensor", reader.device_checksum
    monkeypatch.setattr(reader, "device_checksum", lambda values, box=None: stock(values, box) + 1)
    values = torch.randn(8, 3)
    alone = OneRank()
    with WeightSync(OneReader(), alone, "bfloat16", SharedMemory(alone, "bfloat16", folder=tmp_path)) as sync:
        with pytest.raises(WeightSyncError, match=f"rank 0, {name}.*checksum .* was read; .* was written"):
            sync.push([(name, values, list(same(name).blocks(Local(values, 1, 0, None))))], 1)
