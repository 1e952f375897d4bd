"""Adapters from Megatron's shards reach a vLLM server exactly, and it samples only with the latest ones. The server is
set up as in runs that send adapters alone."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from megagrpo.config import LoraSection, ParallelSection
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.probe import check_plugin
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.process.cleanup.ownership import SHARED_MEMORY, remove_stale
from megagrpo.policy.build import build_model
from megagrpo.policy.lora.lora_layers import attach_adapters
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.sync.trainer_side.adapter_sync import AdapterSync
from megagrpo.sync.vllm_side.worker_verbs import difference
from megagrpo.types import Prompt, SamplingParams
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, fill
from megagrpo.weights.bridge.hf_export import save_hf
from megagrpo.weights.bridge.load import load_hf
from tests.e2e import world
from tests.e2e.tiny_servers import launch, naive_logprobs

LORA = LoraSection(rank=4, alpha=12.0)
GREEDY = SamplingParams(0.0, 12)
PROMPTS = [Prompt(i, tuple((7 * i + 3 * k) % 250 for k in range(4 + i)), "") for i in range(5)]


@pytest.fixture(scope="module")
def engine() -> VllmEngine:
    """The server under test accepts adapters."""
    launcher = launch(world.folder() / "model", "lora", lora_rank=LORA.rank)
    launcher.wait()
    return VllmEngine(launcher.urls, lambda ids: "", max_num_seqs=64, logs=launcher.logs, adapters=1)


def push(
    parallel: dict,
    engine,
    salt: str,
    out: Path,
    version: int,
    lora: LoraSection = LORA,
    spoil: float = 0.0,
    parent: Path | None = None,
) -> int:
    """Make adapters that depend on `salt`, write the merged model to `out`, and push the adapters; return the bytes
    that the workers read. With `parent` the servers cannot read the files there, as on another host."""
    layout = init_layout(ParallelSection(**parallel))
    folder = world.folder() / "model"
    hf_config = load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, own_linears=True))
    attach_adapters(chunks, hf_config, lora, recompute="none")
    load_hf(chunks, hf_config, folder, layout)
    with torch.no_grad():
        for _, param, found in adapter_blocks(chunks, hf_config, layout):
            fill(param, found, lambda block: random_tensor(salt + block.name, block.shape)[block.slices] + spoil)
    if not spoil:
        save_hf(chunks, hf_config, layout, out, folder)
    elsewhere = () if parent is None else (lambda url: False, parent)
    driver = engine if layout.world_rank == 0 else None
    with AdapterSync(driver, layout, "float32", lora, str(folder), *elsewhere) as sync:
        read = sync.push(adapter_blocks(chunks, hf_config, layout), version).bytes_read
    layout.close()
    return read


def sync(engine: VllmEngine, *arguments, ranks: int = 1, parallel: dict | None = None) -> int:
    version = engine.weight_version + 1
    salt, out = arguments
    read = run_ranks(push, ranks, parallel or {}, engine, salt, out, version)[0]
    engine.weight_version = version  # the ranks are forks and have their own client
    return read


def answers(engine: VllmEngine) -> list[tuple]:
    return [
        (group[0].response_ids.tolist(), group[0].rollout_logprobs.tolist())
        for group in engine.generate(PROMPTS, 1, GREEDY, seed=0)
    ]


def served(engine: VllmEngine) -> list[str]:
    return [model["id"] for model in httpx.get(f"{engine.urls[0]}/v1/models").json()["data"]]


@pytest.mark.full
def test_a_run_whose_weights_such_a_server_cannot_take_does_not_start(engine, tmp_path):
    check_plugin([world.server()])
    with pytest.raises(
        ValueError,
        match=r"http://[\d.:]+ cannot receive weights; start it with --weight-transfer-config '\{\"backend\"",
    ):
        check_plugin(engine.urls)
    refused = world.train(tmp_path, f"rollout.urls={engine.urls}")
    assert refused.code == 2 and f"rollout.urls: {engine.urls[0]} cannot receive weights" in refused.err


@pytest.mark.full
def test_a_server_samples_with_the_adapter_that_came_last(engine, tmp_path):
    bare = answers(engine)
    sync(engine, "a", tmp_path / "a", ranks=4, parallel=dict(tp=2, pp=2))
    first = answers(engine)
    for prompt, (ids, logprobs) in zip(PROMPTS, first, strict=True):
        torch.testing.assert_close(
            torch.tensor(logprobs), naive_logprobs(tmp_path / "a", prompt, ids), atol=1e-4, rtol=0
        )
    read = sync(engine, "b", tmp_path / "b")
    assert len({str(each) for each in (bare, first, answers(engine))}) == 3
    assert served(engine) == ["policy", f"policy-{engine.weight_version}"]
    sync(engine, "a", tmp_path / "again")
    assert answers(engine) == first
    base = load_file(world.folder() / "model/model.safetensors")
    assert (
        read < sum(t.nbytes for t in base.values())
        and load_file(tmp_path / "a/model.safetensors").keys() == base.keys()
    )


@pytest.mark.full
def test_cached_prefixes_of_an_earlier_run_are_not_those_of_its_successor(engine, tmp_path):
    before = engine.weight_version
    found = []
    for salt in "ab":  # the second run begins with the same version
        engine.weight_version = before
        sync(engine, salt, tmp_path / salt)
        found.append(answers(engine))
        for prompt, (ids, logprobs) in zip(PROMPTS, found[-1], strict=True):
            expected = naive_logprobs(tmp_path / salt, prompt, ids)
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    assert found[0] != found[1]


@pytest.mark.full
@pytest.mark.parametrize(
    "chosen",
    [
        dict(target_modules=["q_proj", "o_proj", "up_proj"], layers_to_transform=[1]),
        dict(target_modules=r".*\.0\.(self_attn\.[kv]_proj|mlp\.down_proj)"),
    ],
    ids=str,
)
def test_it_samples_with_an_adapter_of_some_modules_in_some_layers(engine, chosen, tmp_path):
    lora, version = LORA.model_copy(update=chosen), engine.weight_version + 1
    run_ranks(push, 2, dict(pp=2), engine, "a", tmp_path / "a", version, lora)
    engine.weight_version = version
    for prompt, (ids, logprobs) in zip(PROMPTS, answers(engine), strict=True):
        expected = naive_logprobs(tmp_path / "a", prompt, ids)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.full
def test_an_adapter_that_vllm_refuses_or_that_is_not_finite_is_an_error_and_the_old_one_stays(engine, tmp_path):
    sync(engine, "a", tmp_path / "a")
    before = answers(engine)
    for change, message in (
        (dict(lora=LORA.model_copy(update=dict(rank=16))), "answered 500"),
        (
            dict(spoil=float("nan")),
            r"WeightSyncError: weight version \d+ was not written: .*lora_A.weight holds nan at \[0, 0\]",
        ),
    ):
        with pytest.raises(Exception, match=message):
            run_ranks(_push_changed, 1, engine, tmp_path / message, engine.weight_version + 1, change)
        assert answers(engine) == before


def _push_changed(engine: VllmEngine, out: Path, version: int, change: dict) -> None:
    push({}, engine, "c", out, version, **change)


def test_what_a_worker_holds_must_be_what_was_written():
    sums = {"layers.0.mlp.up_proj": ["1", "2"], "layers.0.mlp.down_proj": ["3", "4"]}
    assert not difference(sums, dict(sums))
    for wrong in ({"layers.0.mlp.up_proj": ["1", "2"]}, sums | {"layers.0.mlp.down_proj": ["3", "5"]}):
        assert "adapter of layers.0.mlp.down_proj: the checksums differ from the written ones" in difference(
            sums, wrong
        )


def ask(engine: VllmEngine, method: str, *words) -> list[str]:
    answer = httpx.post(f"{engine.urls[0]}/collective_rpc", json={"method": method, "args": words}, timeout=60)
    return answer.json()["results"]


@pytest.mark.full
def test_a_worker_tells_what_differs_and_stores_nothing_outside_of_a_trainers_folder(engine, tmp_path):
    sync(engine, "a", tmp_path / "a")
    (problem,) = ask(engine, "adapter_problem", {"layers.0.mlp.up_proj": ["1", "2"]})
    assert problem == "adapter of layers.0.mlp.down_proj: the checksums differ from the written ones"
    for owner, adapter, name in (("..", "adapter1", "x"), ("megagrpo-1.abcdefgh", "..", "x"), ("tmp", "a", "b")):
        (problem,) = ask(engine, "store_adapter", owner, adapter, [], name, "", True)
        assert problem == f"ValueError: {owner}/{adapter}/{name} is no name of an adapter's file"


@pytest.mark.full
def test_a_server_on_another_host_gets_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr("megagrpo.engine.server_updates.ADAPTER_PART", 1000)  # many parts
    launcher = launch(world.folder() / "model", "lora_elsewhere", lora_rank=LORA.rank)
    launcher.wait()
    engine = VllmEngine(launcher.urls, lambda ids: "", max_num_seqs=64, logs=launcher.logs, adapters=1)
    before, held = set(SHARED_MEMORY.glob("megagrpo-*")), []
    for version in (1, 2):
        run_ranks(push, 1, {}, engine, f"{version}", tmp_path / f"{version}", version, LORA, 0.0, tmp_path / "shm")
        engine.weight_version = version
        for prompt, (ids, logprobs) in zip(PROMPTS, answers(engine), strict=True):
            expected = naive_logprobs(tmp_path / f"{version}", prompt, ids)
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
        assert not list((tmp_path / "shm").iterdir())  # the trainer has removed its own
        # the folder of the first trainer is gone
        (folder,) = [path for path in set(SHARED_MEMORY.glob("megagrpo-*")) - before if list(path.glob("adapter*"))]
        held.append(folder)
        assert [path.name for path in folder.glob("adapter*")] == [f"adapter{version}"]
        remove_stale()
        assert folder.exists()
    assert held[0] != held[1]
    launcher.stop()
    remove_stale()
    assert not held[1].exists()


@pytest.mark.full
def test_a_run_that_sends_adapters_alone_trains_as_one_that_sends_weights(engine, tmp_path):
    lora = ("lora.rank=4", "lora.alpha=64", "train.learning_rate=5e-3", "run.max_steps=3")
    merged = world.train(tmp_path / "merged", *lora)
    alone = world.train(tmp_path / "alone", *lora, "lora.sync=adapter", f"rollout.urls={engine.urls}")
    assert (alone.code, merged.code) == (0, 0), alone.err
    assert all(line["token_mult_prob_error"] < 1.001 for line in alone.metrics)
    assert [line["weight_version"] for line in alone.metrics] == [2, 3, 4] and served(engine)[-1] == "policy-4"
    for found, expected in zip(alone.metrics, merged.metrics, strict=True):
        assert found["reward"] == pytest.approx(expected["reward"], abs=0.05)
