"""Weights pushed straight from Megatron ranks into a vLLM server, which then equals a fresh one. A hung worker is
named."""

import os
import re
import signal
import time

import httpx
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.rendezvous.store_exchange import Exchange
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.sync.trainer_side.point_to_point import PointToPoint
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings
from megagrpo.types import WeightSyncError
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.bridge.load import load_hf
from tests.e2e.tiny_servers import below, connect, launch, model_folder, sampled, tied_llamas, weights

CPU = torch.device("cpu")


def push_from_megatron(parallel: dict, engine, folders: list, version: int, hang: list[int] = ()):
    """Push the weights of each folder in turn. With `hang`, stop these processes in the middle of the first push until
    it has failed."""
    layout = init_layout(ParallelSection(**parallel))
    hf_config = load_hf_config(folders[0])
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32))
    transport = PointToPoint(layout, "float32", TransportSettings(CPU, 4 if hang else 60, 0.05))
    reports, failure = [], None
    with WeightSync(engine if layout.world_rank == 0 else None, layout, "float32", transport) as sync:
        if hang:
            failure = hang_in_the_middle(sync, chunks, hf_config, layout, hang, version)
            transport.seconds = 60
        for number, folder in enumerate(folders):
            load_hf(chunks, hf_config, folder, layout)
            reports.append(sync.push(blocks(chunks, hf_config, layout), version + number))
        sent = sum(message.elements for messages in transport.rounds.values() for message in messages)
    layout.close()
    return [(report.bytes_published, report.bytes_read) for report in reports], sent * 4, failure


def hang_in_the_middle(sync, chunks, hf_config, layout, hang, version) -> tuple[str, float]:
    """Push, and have rank 1 stop these processes before its second round; return each rank's error and its delay."""
    send, sent = Exchange.send, []
    if sync.engine is not None:
        sync.engine.request_timeout = sync.engine.sync_timeout = 6.0  # for every request

    def disturbed(self, buffers):
        sent.append(1)
        if len(sent) == 2 and layout.world_rank == 1:
            for pid in hang:
                os.kill(pid, signal.SIGSTOP)
        return send(self, buffers)

    Exchange.send = disturbed
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as failed:
        sync.push(blocks(chunks, hf_config, layout), version)
    seconds = time.monotonic() - began
    Exchange.send = send
    dist.barrier()
    if layout.world_rank == 1:
        for pid in hang:
            os.kill(pid, signal.SIGCONT)
    return str(failed.value), seconds


def test_a_server_that_slept_and_was_pushed_to_equals_a_fresh_one(monkeypatch):
    synced, fresh = tied_llamas()
    version = synced.engine.weight_version + 1
    folders = [model_folder("llama", 1), model_folder("llama", 0), model_folder("llama", 1)]
    monkeypatch.setattr(synced.engine, "sleeps", True)
    synced.engine.sleep()
    assert httpx.get(f"{synced.engine.urls[0]}/is_sleeping").json() == {"is_sleeping": True}
    results = run_ranks(push_from_megatron, 4, dict(tp=2, pp=2), synced.engine, folders, version)
    synced.engine.weight_version = version + 2  # the ranks' copy of the client moved on, this one did not
    synced.engine.fleet.end_sleep()
    assert httpx.get(f"{synced.engine.urls[0]}/is_sleeping").json() == {"is_sleeping": False}
    assert sampled(synced.engine) == fresh.sampled
    total = sum(tensor.nbytes for tensor in weights(fresh.folder).values())
    assert all(reports == [(total, total)] * 3 for reports, _, _ in results)
    sent = [sent for _, sent, _ in results]
    assert sum(sent) == total and max(sent) < 0.35 * total


def test_ranks_that_share_a_kv_head_send_its_rows_once():
    """Four ranks, two KV heads: a rank has a part of the queries, or of a key and a value."""
    synced, fresh = tied_llamas()
    version = synced.engine.weight_version + 1
    folders = [model_folder("llama", 0), fresh.folder]
    results = run_ranks(push_from_megatron, 4, dict(tp=4), synced.engine, folders, version)
    synced.engine.weight_version = version + 1
    assert sampled(synced.engine) == fresh.sampled
    total = sum(tensor.nbytes for tensor in weights(fresh.folder).values())
    assert all(reports == [(total, total)] * 2 for reports, _, _ in results)
    assert sum(sent for _, sent, _ in results) == total


@pytest.mark.full
def test_a_server_that_hangs_in_the_middle_is_named_and_the_next_push_succeeds():
    synced, fresh = tied_llamas()
    version = synced.engine.weight_version + 1
    processes = below(synced.launcher.servers[0].supervisor.pid)
    results = run_ranks(push_from_megatron, 4, dict(tp=2, pp=2), synced.engine, [fresh.folder], version, processes)
    sending = (
        rf"rank \d: sending (layer \d|tensors outside of layers) \(model\..*\) to worker 0 of {synced.engine.urls[0]}: "
        rf"timed out after 4 s"
    )
    for _, _, (told, seconds) in results:
        assert told.startswith(f"weight version {version} did not reach the engine, which stays paused: ")
        assert re.search(sending, told) and seconds < 20
    synced.engine.weight_version = version
    assert sampled(synced.engine) == fresh.sampled


@pytest.mark.full
def test_two_workers_are_sent_their_own_shares_of_a_model_with_experts():
    folder, other = model_folder("qwen3_moe", 0), model_folder("qwen3_moe", 1)
    running = connect(launch(folder, "qwen3_moe_pushed", tp=2), folder)
    fresh = sampled(running.engine)  # it has just loaded its folder
    results = run_ranks(push_from_megatron, 2, dict(ep=2), running.engine, [other, folder], 1)
    running.engine.weight_version = 2
    assert sampled(running.engine) == fresh
    total = sum(tensor.nbytes for tensor in weights(folder).values())
    for reports, _, _ in results:
        # norms and routers go to both
        assert all(given == taken and total < given < 1.1 * total for given, taken in reports)
    running.launcher.stop()
