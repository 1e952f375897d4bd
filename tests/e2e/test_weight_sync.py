"""Weight sync into real vLLM servers: afterwards they equal fresh engines on the new weights, or an error names the
cause."""

import json
import os
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch.distributed as dist

from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.wire.progress_file import VERSION_SHIFT, ProgressReader
from megagrpo.types import Prompt, WeightSyncError
from tests.distributed.ranks import run_ranks
from tests.e2e.tiny_servers import PROMPTS, SAMPLINGS, push, sampled, shards, tied_llamas, weights
from tests.rank_fakes import GroupRanks, OneRank

LAYER = "model.layers.1.self_attn"


def is_paused(engine):
    return httpx.get(f"{engine.urls[0]}/is_paused").json()["is_paused"]


@pytest.fixture
def synced():
    """The server that these tests push weights to."""
    return tied_llamas()[0]


@pytest.fixture
def fresh():
    """The weights of these tests, and the responses of a server that loaded them from their folder."""
    return tied_llamas()[1]


def test_a_synced_engine_equals_one_that_loaded_the_folder(synced, fresh):
    version = synced.engine.weight_version
    with WeightSync(synced.engine, OneRank(), "float32") as sync:
        sync.push(shards(fresh.folder), version + 1)
        assert sampled(synced.engine) == fresh.sampled
        done = sync.push(shards(synced.folder), version + 2)
        old = sampled(synced.engine)
        assert done.bytes_read == done.bytes_published == sum(t.nbytes for t in weights(synced.folder).values())
        assert old != fresh.sampled
        sync.push(shards(fresh.folder), version + 3)
        assert sampled(synced.engine) == fresh.sampled
        assert synced.engine.generate(PROMPTS[:1], 1, SAMPLINGS[0], 0)[0][0].weight_version == version + 3
        assert list(Path("/dev/shm").glob(f"megagrpo-{os.getpid()}.*"))
    assert not list(Path("/dev/shm").glob(f"megagrpo-{os.getpid()}.*"))


def test_after_a_sync_that_keeps_responses_no_cached_prefix_is_of_older_weights(synced, fresh):
    long = [Prompt(0, tuple(3 + (7 * k) % 900 for k in range(100)), "")]  # three full blocks of the prefix cache

    def response(engine):
        ((rollout,),) = engine.generate(long, 1, SAMPLINGS[0], seed=4)
        return rollout.response_ids.tolist(), rollout.rollout_logprobs.tolist()

    before = synced.engine.in_flight
    synced.engine.in_flight = "keep"  # the only kind of pause in which vLLM keeps its cache
    try:
        push(synced.engine, synced.folder)
        older = response(synced.engine)
        push(synced.engine, fresh.folder)
        newer = response(synced.engine)
    finally:
        synced.engine.in_flight = before
    push(synced.engine, fresh.folder)  # clears the cache
    assert newer == response(synced.engine) != older


def push_from_a_rank(engine, folder, version, poison=None):
    """Two tensor-parallel ranks in two replicas: ranks 0 and 2 hold the same weights, and so do 1 and 3."""
    rank = dist.get_rank()
    found = list(shards(folder, parts=2, part=rank % 2))
    if rank == poison:
        found[3][1].view(-1)[0] = float("nan")
    try:
        with WeightSync(engine if rank == 0 else None, GroupRanks(rank), "float32") as sync:
            report = sync.push(found, version)
            held = sync.transport._published.size
    except WeightSyncError as error:
        return str(error)
    return report.bytes_published, held


def test_ranks_publish_their_own_shards_and_each_block_once(synced, fresh):
    version = synced.engine.weight_version + 1
    results = run_ranks(push_from_a_rank, 4, synced.engine, fresh.folder, version)
    total = sum(tensor.nbytes for tensor in weights(fresh.folder).values())
    assert [published for published, _ in results] == [total] * 4
    assert total <= sum(held for _, held in results) < 1.02 * total and max(held for _, held in results) < 0.35 * total
    synced.engine.weight_version = version  # the ranks' copy of the client has counted, this one has not
    assert sampled(synced.engine) == fresh.sampled


def test_every_rank_learns_which_rank_failed(synced, fresh):
    before = sampled(synced.engine)
    told = run_ranks(push_from_a_rank, 4, synced.engine, fresh.folder, synced.engine.weight_version + 1, 3)
    assert len(set(told)) == 1 and "rank 3: parameter" in told[0] and "NaN" in told[0]
    assert sampled(synced.engine) == before  # no weights reached the engine


class Tampered:
    """Wrapper of an engine that damages the written weights just before the engine loads them."""

    def __init__(self, engine, tamper):
        self.engine, self.tamper = engine, tamper

    def load_weights(self, update, only=None):
        if not self.tamper:
            return self.engine.load_weights(update, only)
        update.request("nobody")  # writes the index
        ProgressReader(update.folder, update.index.version, 60).wait_for(0, update.slots.size, "everything")
        written = update.path.read_text()
        self.tamper(data := json.loads(written))
        self.tamper = None
        update.path.write_text(json.dumps(data))
        try:
            return self.engine.load_weights(update, only)
        finally:
            update.path.write_text(written)

    def resume(self, update, only=None):
        self.engine.resume(update, only)


def without(*names):
    def tamper(tensor_index):
        for name in names:
            del tensor_index["tensors"][name]

    return tamper


def half_of_the_tensors(tensor_index):
    for name in sorted(tensor_index["tensors"])[::2]:
        del tensor_index["tensors"][name]


def without_a_block(tensor_index):
    del tensor_index["tensors"][f"{LAYER}.o_proj.weight"]["blocks"][1]


def with_a_flipped_bit(tensor_index):
    block = tensor_index["tensors"][f"{LAYER}.o_proj.weight"]["blocks"][1]
    with open(block["file"], "r+b") as file:
        file.seek(block["offset"] + 13)
        byte = file.read(1)
        file.seek(block["offset"] + 13)
        file.write(bytes([byte[0] ^ 4]))


def without_a_file(tensor_index):
    Path(tensor_index["tensors"][f"{LAYER}.o_proj.weight"]["blocks"][0]["file"]).unlink()


def with_a_short_file(tensor_index):
    block = tensor_index["tensors"][f"{LAYER}.o_proj.weight"]["blocks"][0]
    block["offset"] += 2**30


def of_another_version(tensor_index):
    for path in Path(tensor_index["tensors"]["model.norm.weight"]["blocks"][0]["file"]).parent.glob("rank0.progress*"):
        np.memmap(path, np.uint64)[0] += 2 << VERSION_SHIFT


def with_another_shape(tensor_index):
    tensor = tensor_index["tensors"]["model.norm.weight"]
    tensor["shape"] = [64]
    tensor["blocks"][0]["box"] = [[0], [64]]


def halves(folder):
    """Both halves of every matrix, on one rank."""
    return [*shards(folder, 2, 0), *shards(folder, 2, 1)]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (half_of_the_tensors, r"no weights received for model\.|only part of the weights received for model\."),
        (
            without(f"{LAYER}.k_proj.weight"),
            r"only part of the weights received for model\.layers\.1\.self_attn\.qkv_proj\.weight \(\d+ of \d+",
        ),
        (without("model.embed_tokens.weight"), r"no weights received for model\.embed_tokens\.weight"),
        (without_a_block, r"model\.layers\.1\.self_attn\.o_proj\.weight: no rank holds \[0:128, 64:128\]"),
        (with_a_flipped_bit, r"rank 0, model\.layers\.1\.self_attn\.o_proj\.weight\[0:128, 64:128\]: checksum"),
        (without_a_file, r"worker 0 of http\S+: .*rank 0, model\..* cannot be read: No such file"),
        (with_a_short_file, r"rank 0, model\.layers\.1\.self_attn\.o_proj\.weight: .* holds \d+ bytes"),
        (of_another_version, r"worker 0 of http\S+: .*rank 0 aborted weight version \d+, "),
        (with_another_shape, r"worker 0 of http\S+: "),
    ],
    ids=lambda x: getattr(x, "__name__", " "),
)
def test_a_sync_that_goes_wrong_is_told_leaves_the_engine_paused_and_can_be_repeated(synced, fresh, tamper, message):
    version = synced.engine.weight_version + 1
    with WeightSync(Tampered(synced.engine, tamper), OneRank(), "float32") as sync:
        with pytest.raises(WeightSyncError, match=rf"(?s)weight version {version} did not reach the engine.*{message}"):
            sync.push(halves(fresh.folder), version)
        assert is_paused(synced.engine)
        sync.push(halves(fresh.folder), version)
    assert not is_paused(synced.engine) and sampled(synced.engine) == fresh.sampled


def test_an_update_that_another_client_left_open_does_not_block_the_next(synced, fresh):
    url = synced.engine.urls[0]
    assert (
        httpx.post(f"{url}/pause?mode=wait").status_code == httpx.post(f"{url}/start_weight_update").status_code == 200
    )
    push(synced.engine, fresh.folder)
    assert sampled(synced.engine) == fresh.sampled
