"""Images in a real vLLM: log-probs as transformers computes them, and updates that leave the tower as it was loaded."""

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_vision import KINDS, asked, full_logits, is_text, write_model

from megagrpo.config import LoraSection, ParallelSection
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.connections import Connections
from megagrpo.engine.image_features import image_hashes
from megagrpo.engine.servers.serving import _adapted, _is_packed
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.lora.lora_layers import attach_adapters
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.sync.trainer_side.adapter_sync import AdapterSync
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.types import Prompt, SamplingParams
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, blocks, fill
from megagrpo.weights.bridge.adapter_files import save_adapter
from megagrpo.weights.bridge.hf_export import find_sources, save_hf
from megagrpo.weights.bridge.load import load_hf
from tests.e2e.tiny_servers import connect, launch

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def prompts_of(folder) -> list[Prompt]:
    return [Prompt(i, ids, messages, inputs=inputs) for i, (messages, ids, inputs) in enumerate(asked(folder))]


def push(engine, folder, version: int, sizes: dict, out) -> int:
    """Load `folder` into shards, push them, and export them to `out`, unless None; return the bytes that were read."""
    layout, hf_config = init_layout(ParallelSection(**sizes)), load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False))
    load_hf(chunks, hf_config, folder, layout)
    if out is not None:
        save_hf(chunks, hf_config, layout, out, folder)
    with WeightSync(engine if layout.world_rank == 0 else None, layout, "float32") as sync:
        read = sync.push(blocks(chunks, hf_config, layout), version).bytes_read
    layout.close()
    return read


def theirs(folder, prompts: list, answers: list[tuple], dtype: torch.dtype = torch.float32, adapter=None) -> list:
    """transformers' log-probs of each response."""
    pairs = zip(prompts, answers, strict=True)
    samples = [([*prompt.token_ids, *ids], prompt.inputs) for prompt, (ids, _) in pairs]
    (logits,) = run_ranks(full_logits, 1, folder, samples, dtype, adapter)
    pairs = zip(answers, logits, strict=True)
    return [
        one[-len(ids) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0] for (ids, _), one in pairs
    ]


def mean_distance(some: list, others: list) -> float:
    return sum((one - other).abs().mean().item() for one, other in zip(some, others, strict=True)) / len(some)


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_sees_the_images_and_updates_leave_its_tower(kind, tmp_path):
    folder, spoiled = tmp_path / "model", tmp_path / "spoiled"
    write_model(folder, kind=kind, **KINDS[kind].served)
    write_model(spoiled, kind=kind, **KINDS[kind].served)
    tensors = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if is_text(name)}
    changed = {name: 0.9 * tensor for name, tensor in tensors.items()}  # the tower's too: a sync must not send it
    save_file(changed, spoiled / "model.safetensors", metadata={"format": "pt"})
    prompts = prompts_of(folder)
    dtype = KINDS[kind].served_dtype
    running = connect(launch(folder, f"images_{kind}", images=True, finds_text=True, dtype=dtype), folder)
    engine = running.engine

    def answers() -> list[tuple]:
        groups = engine.generate(prompts, 2, SamplingParams(1.0, 12), seed=0)
        return [(r.response_ids.tolist(), r.rollout_logprobs.tolist()) for group in groups for r in group]

    def pushed(source, ranks: int, sizes: dict, out=None) -> int:
        read = run_ranks(push, ranks, engine, source, engine.weight_version + 1, sizes, out)[0]
        engine.weight_version += 1  # the ranks are forks and have their own client
        return read

    try:
        fresh = answers()
        pushed(spoiled, 1, {})
        assert answers() != fresh
        size = sum(tensor.nbytes for tensor in text.values())
        assert pushed(folder, 2, dict(tp=2), tmp_path / "export") == size, (
            "each byte of the language model is read once"
        )
        assert answers() == fresh  # to the last bit
    finally:
        running.launcher.stop()
    twice = [prompt for prompt in prompts for _ in range(2)]
    served, expected = [torch.tensor(logprobs) for _, logprobs in fresh], theirs(folder, twice, fresh)
    worst = max((one - other).abs().max().item() for one, other in zip(served, expected, strict=True))
    print(f"{kind}: log-probs differ by {worst:.1e}")
    if dtype == "bfloat16":
        rounded = theirs(folder, twice, fresh, torch.bfloat16)
        assert mean_distance(served, expected) <= 1.5 * mean_distance(rounded, expected)
    else:
        assert worst < 1e-4
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == tensors.keys() and all(torch.equal(exported[name], tensors[name]) for name in tensors)


def test_vllm_loads_experts_as_transformers_saves_them(tmp_path):
    folder = tmp_path / "model"
    write_model(folder, kind="qwen3_vl_moe", released=False)
    options = dict(images=True, finds_text=True, packed=_is_packed(folder))
    running = connect(launch(folder, "images_saved", **options), folder)
    try:
        prompts = prompts_of(folder)
        groups = running.engine.generate(prompts, 1, SamplingParams(1.0, 12), seed=0)
    finally:
        running.launcher.stop()
    answers = [(r.response_ids.tolist(), r.rollout_logprobs.tolist()) for (r,) in groups]
    for (_, logprobs), expected in zip(answers, theirs(folder, prompts, answers), strict=True):
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def push_adapter(engine, folder, out, lora: LoraSection) -> None:
    """Give the model adapters over ranks, write them to `out`, and push them alone."""
    layout, hf_config = init_layout(ParallelSection(tp=2)), load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, own_linears=True))
    attach_adapters(chunks, hf_config, lora, recompute="none")
    load_hf(chunks, hf_config, folder, layout)
    found = list(adapter_blocks(chunks, hf_config, layout))
    for _, parameter, of_it in found:
        fill(parameter, of_it, lambda block: 0.3 * random_tensor(block.name, block.shape)[block.slices])
    save_adapter(found, layout, find_sources(found, layout), out, lora, str(folder), torch.float32)
    with AdapterSync(engine if layout.world_rank == 0 else None, layout, "float32", lora, str(folder)) as sync:
        sync.push(adapter_blocks(chunks, hf_config, layout), 2)
    layout.close()


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_adapters_of_the_language_model_reach_vllm(kind, tmp_path):
    folder, lora = tmp_path / "model", LoraSection(rank=4, alpha=6.0)
    write_model(folder, kind=kind)
    prompts, options = prompts_of(folder), dict(lora_rank=4, lora_modules=_adapted(lora, folder))
    launcher = launch(folder, f"images_{kind}_adapters", images=True, finds_text=True, **options)
    try:
        launcher.wait()
        engine = VllmEngine(launcher.urls, lambda ids: "", max_num_seqs=64, logs=launcher.logs, adapters=1)
        run_ranks(push_adapter, 2, engine, folder, tmp_path / "adapter", lora)
        engine.weight_version = 2  # the ranks are forks and have their own client
        groups = engine.generate(prompts, 1, SamplingParams(1.0, 12), seed=0)
    finally:
        launcher.stop()
    answers = [(r.response_ids.tolist(), r.rollout_logprobs.tolist()) for (r,) in groups]
    for (_, logprobs), expected in zip(
        answers, theirs(folder, prompts, answers, adapter=tmp_path / "adapter"), strict=True
    ):
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    plain = theirs(folder, prompts, answers)
    assert max((torch.tensor(one) - other).abs().max() for (_, one), other in zip(answers, plain, strict=True)) > 1e-2


def sizes_of_requests(engine: VllmEngine, prompts: list, monkeypatch) -> tuple[list, list[int]]:
    """Eight responses to each prompt, and the bytes of each request."""
    sizes, send = [], Connections.post

    async def counted(self, url, path, body, *more):
        sizes.append(len(body))
        return await send(self, url, path, body, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Connections, "post", counted)
        groups = engine.generate(prompts, 8, SamplingParams(1.0, 12), seed=0)
    return [(r.response_ids.tolist(), r.rollout_logprobs.tolist()) for group in groups for r in group], sizes


def test_pixels_are_sent_once_to_a_server_that_keeps_them(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    write_model(folder)
    running = connect(launch(folder, "images_kept", images=True, finds_text=True), folder, keeps_images=True)
    engine, prompts = running.engine, prompts_of(folder)
    try:
        uploads = engine._uploads
        uploads._sent[engine.urls[0]] |= {name for p in prompts if p.inputs for name in image_hashes(p.inputs)}
        dropped, _ = sizes_of_requests(engine, prompts, monkeypatch)  # as if the server had dropped them
        first, once = sizes_of_requests(engine, prompts, monkeypatch)
        again, never = sizes_of_requests(engine, prompts, monkeypatch)
        engine.keeps_images = False
        whole, always = sizes_of_requests(engine, prompts, monkeypatch)
    finally:
        running.launcher.stop()
    print(f"bytes of requests: {sum(always)} with all pixels, {sum(once)} with pixels once, {sum(never)} with none")
    eight = [prompt for prompt in prompts for _ in range(8)]
    for answers in (dropped, first, again, whole):
        for (_, logprobs), expected in zip(answers, theirs(folder, eight, answers), strict=True):
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    assert len(once) >= len(never) == len(always) == 32
    assert sum(never) < 0.05 * sum(always) and sum(once) < 0.2 * sum(always)
