"""vLLM servers of two tensor-parallel workers get the weights of Megatron's shards exactly: dense models and experts,
whole weights and adapters. Most tests share one server; `full` tests start their own."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megagrpo.config import LoraSection, ParallelSection
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineDeadError, EngineError
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.rendezvous.store_exchange import is_here
from megagrpo.policy.build import build_model
from megagrpo.policy.lora.lora_layers import attach_adapters
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.sync.trainer_side.adapter_sync import AdapterSync
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.types import SamplingParams, WeightSyncError
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, fill, merged_blocks
from megagrpo.weights.bridge.hf_export import save_hf
from megagrpo.weights.bridge.load import load_hf
from tests.e2e.test_weight_sync import LAYER, OneRank, Tampered, halves, with_a_flipped_bit, without
from tests.e2e.tiny_servers import (
    PROMPTS,
    WORKERS_SHARE_MEMORY,
    Running,
    below,
    connect,
    greedy,
    halt,
    is_halted,
    launch,
    model_folder,
    naive_logprobs,
    push_from_megatron,
    tokenizer_of_threes,
    weights,
)

LORA = LoraSection(rank=4, alpha=6.0)


@pytest.fixture(scope="module")
def two_workers() -> Running:
    """A server on a model with biases."""
    folder = model_folder("qwen2", 0)
    return connect(launch(folder, "qwen2", tp=2), folder)


@pytest.fixture(scope="module")
def two_workers_with_experts() -> Running:
    """A server whose two workers each hold two of four whole experts."""
    folder = model_folder("qwen3_moe", 0)
    return connect(launch(folder, "qwen3_moe_ep", tp=2, expert_parallel=True), folder)


def push(ranks: int, parallel: dict, running: Running, folder: Path, out: Path) -> int:
    """Push `folder` from Megatron's shards; return the bytes that the workers read."""
    version = running.engine.weight_version + 1
    read = run_ranks(push_from_megatron, ranks, parallel, running.engine, folder, out, version)[0]
    running.engine.weight_version = version  # the ranks are forks and have their own client
    return read


def there_and_back(running: Running, layouts: list[tuple[int, dict]], tmp_path: Path) -> list[int]:
    """Push other weights and then the server's own from each layout. Assert that the server responds as before; return
    the bytes that the workers read each time."""
    fresh, other, read = greedy(running.engine), model_folder(running.folder.name[:-1], 1), []
    for ranks, parallel in layouts:
        read.append(push(ranks, parallel, running, other, tmp_path / f"there{len(read)}"))
        assert [ids for ids, _ in greedy(running.engine)] != [ids for ids, _ in fresh]
        read.append(push(ranks, parallel, running, running.folder, tmp_path / f"back{len(read)}"))
        assert greedy(running.engine) == fresh
    return read


def assert_log_probs(running: Running) -> None:
    """Assert that the server's greedy log-probs equal transformers' log-probs on its folder."""
    for prompt, (ids, logprobs) in zip(PROMPTS, greedy(running.engine), strict=True):
        torch.testing.assert_close(
            torch.tensor(logprobs), naive_logprobs(running.folder, prompt, ids), rtol=0, atol=1e-3
        )


def test_two_workers_synced_from_any_shards_are_a_fresh_engine_and_read_their_own_halves(two_workers, tmp_path):
    read = there_and_back(two_workers, [(1, {}), (4, dict(tp=2, pp=2))], tmp_path)
    total = sum(t.nbytes for t in weights(two_workers.folder).values())
    assert all(total < count < 1.05 * total for count in read)  # norms and the bias of o_proj are read twice
    (rollout,) = two_workers.engine.generate(PROMPTS[:1], 1, SamplingParams(1.0, 24), seed=3)[0]
    expected = naive_logprobs(two_workers.folder, rollout.prompt, rollout.response_ids)
    torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), expected, rtol=0, atol=1e-3)


def with_adapters(
    parallel: dict,
    salt: str,
    engine: VllmEngine,
    folder: Path,
    out: Path,
    version: int,
    alone: bool,
    lora: LoraSection = LORA,
    here: Callable[[str], bool] = is_here,
) -> int:
    """Load `folder` with random adapters, write the merged model to `out`, and push adapters, `alone` or merged; return
    the bytes read."""
    layout = init_layout(ParallelSection(**parallel))
    hf_config = load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, own_linears=True))
    attach_adapters(chunks, hf_config, lora, recompute="none")
    load_hf(chunks, hf_config, folder, layout)
    with torch.no_grad():
        for _, param, found in adapter_blocks(chunks, hf_config, layout):
            fill(param, found, lambda block: random_tensor(salt + block.name, block.shape)[block.slices])
    save_hf(chunks, hf_config, layout, out, folder)
    driver = engine if layout.world_rank == 0 else None
    sync = (
        AdapterSync(driver, layout, "float32", lora, str(folder), here)
        if alone
        else WeightSync(driver, layout, "float32")
    )
    with sync:
        found = (adapter_blocks if alone else merged_blocks)(chunks, hf_config, layout)
        read = sync.push(found, version).bytes_read
    layout.close()
    return read


def as_the_merged_model(running: Running, merged: Path) -> list[tuple]:
    """Return the server's greedy responses, after asserting that their log-probs equal transformers' on `merged`."""
    found = greedy(running.engine)
    for prompt, (ids, logprobs) in zip(PROMPTS, found, strict=True):
        torch.testing.assert_close(torch.tensor(logprobs), naive_logprobs(merged, prompt, ids), atol=1e-3, rtol=0)
    return found


def test_weights_with_adapters_added_reach_two_workers(two_workers, tmp_path):
    before, version = greedy(two_workers.engine), two_workers.engine.weight_version + 1
    run_ranks(
        with_adapters, 2, dict(tp=2), "a", two_workers.engine, two_workers.folder, tmp_path / "sum", version, False
    )
    two_workers.engine.weight_version = version
    assert as_the_merged_model(two_workers, tmp_path / "sum") != before


def test_a_checksum_that_no_worker_can_tell_alone_is_verified_over_both(two_workers):
    engine = Tampered(two_workers.engine, with_a_flipped_bit)
    with (
        WeightSync(engine, OneRank(), "float32") as sync,
        pytest.raises(WeightSyncError, match=r"rank 0, model\.layers\.1\.self_attn\.o_proj"),
    ):
        sync.push(halves(model_folder("qwen2", 1)), two_workers.engine.weight_version + 1)


def test_an_update_that_both_workers_refuse_leaves_no_answer_behind(two_workers):
    version = two_workers.engine.weight_version + 1
    with WeightSync(two_workers.engine, OneRank(), "float32") as sync:
        sync.push(halves(two_workers.folder), version)
    expected = greedy(two_workers.engine)
    with WeightSync(Tampered(two_workers.engine, without(f"{LAYER}.k_proj.weight")), OneRank(), "float32") as sync:
        with pytest.raises(
            WeightSyncError,
            match=r"phase update: worker 0 of http.*: .*only part of the weights received .*; worker 1 of ",
        ):
            sync.push(halves(model_folder("qwen2", 1)), version + 1)
        # vLLM would take the second worker's refusal as the response to this request
        sync.push(halves(two_workers.folder), version + 2)
    assert greedy(two_workers.engine) == expected


def test_a_server_without_a_tokenizer_is_refused_when_it_misses_a_stop_string(two_workers):
    engine = VllmEngine(two_workers.launcher.urls, tokenizer_of_threes().decode, any_version=True)
    (plain,) = engine.generate(PROMPTS[:1], 1, SamplingParams(0.0, 16), seed=0)[0]
    with pytest.raises(
        EngineError, match=r"went on after the stop string '.' \(rollout.stop\); start it without --skip-tokenizer-init"
    ):
        engine.generate(PROMPTS[:1], 1, SamplingParams(0.0, 16, stop=(plain.text[10],)), seed=0)


@pytest.mark.parametrize(
    ("moment", "passes", "place"),
    [
        pytest.param(
            "start",
            0,
            r"phase start: .* did not respond to /start_weight_update within 3 s .*worker 0 is stuck in: start$",
            marks=pytest.mark.full,
        ),
        (
            "update",
            5,
            r"phase update: .* did not respond to /update_weights within 3 s .*worker 1 is stuck in: the load of "
            r"model\.",
        ),
        pytest.param(
            "finish",
            0,
            r"phase finish: .* did not respond to /finish_weight_update within 3 s .*worker 1",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_worker_that_hangs_is_named_with_its_phase_and_tensor(two_workers, moment, passes, place, monkeypatch):
    monkeypatch.setattr(two_workers.engine, "sync_timeout", 3.0)
    version = two_workers.engine.weight_version + 1
    with WeightSync(two_workers.engine, OneRank(), "float32") as sync:
        sync.push(halves(two_workers.folder), version)
        worker = halt(two_workers.engine.urls[0], 1, moment, passes)
        with pytest.raises(WeightSyncError, match=r"did not reach the engine, which stays paused") as told:
            sync.push(halves(model_folder("qwen2", 1)), version + 1)
        assert is_halted(worker) and re.search(place, str(told.value)), told.value
        os.kill(worker, signal.SIGCONT)
        sync.push(halves(two_workers.folder), version + 2)
    with WeightSync(two_workers.engine, OneRank(), "float32") as sync:
        sync.push(halves(two_workers.folder), version + 3)


@pytest.mark.full
def test_a_server_that_is_killed_while_it_works_is_a_dead_engine(two_workers):
    server = two_workers.launcher.servers[0]
    family = below(server.supervisor.pid)
    files = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    files = {file for file in files for pid in family if file in Path(f"/proc/{pid}/maps").read_text()}
    assert any("psm_megagrpo-" in file for file in files)
    assert any("cpushm" in file for file in files) == WORKERS_SHARE_MEMORY
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    engine = VllmEngine(two_workers.launcher.urls, str, logs=two_workers.launcher.logs)
    with pytest.raises(EngineDeadError, match=r"no vLLM server responds any longer: .*qwen2/vllm_0\.log"):
        engine.generate(PROMPTS, 1, replace(SamplingParams(1.0, 24), max_tokens=64), seed=0)
    server.supervisor.wait(20)
    assert not [file for file in files if Path(file).exists()]


@pytest.mark.full
def test_experts_reach_workers_that_have_whole_ones(two_workers_with_experts, tmp_path):
    layouts = [(1, {}), (2, dict(ep=2)), (4, dict(tp=2, ep=2, etp=1, sequence_parallel=True, pp=2))]
    read = there_and_back(two_workers_with_experts, layouts, tmp_path)
    tensors = weights(two_workers_with_experts.folder)
    total, experts = (sum(t.nbytes for name, t in tensors.items() if part in name) for part in ("", ".experts."))
    assert all(total < count < total + 0.1 * (total - experts) for count in read)  # no expert is read twice
    assert_log_probs(two_workers_with_experts)


@pytest.mark.full
def test_clamped_experts_and_sinks_reach_workers_that_have_a_part_of_each(tmp_path):
    folder = model_folder("gpt_oss", 0)
    running = connect(launch(folder, "gpt_oss2", tp=2), folder)
    sizes = dict(tp=2, sequence_parallel=True)
    try:
        read = there_and_back(running, [(2, sizes), (4, sizes | dict(pp=2))], tmp_path)
        assert_log_probs(running)
    finally:
        running.launcher.stop()
    exported, original = weights(tmp_path / "back1"), weights(folder)
    assert exported.keys() == original.keys() and all(torch.equal(exported[name], original[name]) for name in original)
    total = sum(tensor.nbytes for tensor in original.values())
    assert all(total < count < 1.01 * total for count in read)  # both read the parameters that they hold whole


@pytest.mark.full
def test_adapters_alone_reach_two_workers(tmp_path):
    folder = model_folder("llama", 0)
    running = connect(launch(folder, "llama_lora2", tp=2, lora_rank=LORA.rank), folder, adapters=1)
    bare, answers = greedy(running.engine), []
    for version, (ranks, salt) in enumerate(((4, "a"), (1, "b"), (1, "a")), 1):
        parallel = dict(tp=2, pp=2) if ranks == 4 else {}
        out = tmp_path / f"{version}"
        run_ranks(with_adapters, ranks, parallel, salt, running.engine, folder, out, version, True)
        running.engine.weight_version = version
        answers.append(as_the_merged_model(running, out))
    assert answers[0] == answers[2] and len({str(bare), str(answers[0]), str(answers[1])}) == 3
    running.launcher.stop()
