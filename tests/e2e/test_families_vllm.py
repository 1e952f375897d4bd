"""Every family in a real vLLM: weights from Megatron's shards arrive exactly, and both compute the same log-probs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_families import EVERY, WRAPPED, family_of, on_one_stage, tiny_model, write_model
from tiny_omni import write_processor

from megagrpo.config import LoraSection, ParallelSection
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineStartError
from megagrpo.engine.servers.serving import ADAPTER_MODEL, _adapted, adapter_arguments
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.build import build_model
from megagrpo.policy.lora.lora_layers import attach_adapters
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.sync.trainer_side.adapter_sync import AdapterSync
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.types import Prompt, SamplingParams
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, blocks, fill, tensor_names
from megagrpo.weights.bridge.adapter_files import save_adapter
from megagrpo.weights.bridge.hf_export import find_sources, save_hf
from megagrpo.weights.bridge.load import load_hf
from tests import family_examples
from tests.e2e.tiny_servers import connect, launch, naive_logprobs, scratch, weights
from tests.family_examples import TINY_SIZES

PROMPTS = [Prompt(i, tuple((7 * i + 3 * k) % TINY_SIZES["vocab_size"] for k in range(4 + i)), "") for i in range(5)]
GREEDY = SamplingParams(0.0, 24)
LAYOUT = dict(tp=2, pp=2, sequence_parallel=True)
LORA = LoraSection(rank=4, alpha=6.0)
LONGEST = 128  # tokens, of tiny_servers
# vLLM's attention on CPUs requires heads of 32 dimensions or more.
WIDE = dict(hidden_size=192)
CHANGES: dict[str, dict[str, Any]] = {"phi3 tied, part of the head, longrope": dict(partial_rotary_factor=0.1875)}
EXAMPLES = {name: family_examples.EXAMPLES[family_of(name).model_type] for name in EVERY}
# Case -> the error of vLLM, which cannot run it.
REFUSED = {name: error for name, example in EXAMPLES.items() if (error := example.unserved.get(name))}
SERVED = [
    name for name, example in EXAMPLES.items() if name not in example.unserved and family_of(name).unserved is None
]


def folder_of(name: str, spoiled: bool = False) -> Path:
    """The tiny model as a folder; with `spoiled`, the weights differ."""
    kind, extra = EVERY[name]
    heads = dict(head_dim=32) if "head_dim" in extra else {}
    folder = scratch() / f"{re.sub(r'[^a-z0-9]+', '_', name)}{'_spoiled' * spoiled}"
    model = tiny_model(kind, extra | WIDE | heads | EXAMPLES[name].served | CHANGES.get(name, {}))
    with torch.no_grad():
        for parameter in model.parameters() if spoiled else ():
            parameter.mul_(0.9)
    write_model(model, folder)
    if model.config.model_type == "qwen3_omni_moe":
        write_processor(folder, TINY_SIZES["vocab_size"] - 20)
    return folder


def push(engine, folder: Path, version: int, sizes: dict) -> int:
    """Load `folder` into Megatron's shards and push them; return the bytes that the server read."""
    layout, hf_config = init_layout(ParallelSection(**sizes)), load_hf_config(folder)
    chunks = build_model(
        hf_config,
        layout,
        ModelOptions(dtype=torch.float32, init_weights=False, sequence_parallel=sizes.get("sequence_parallel", False)),
    )
    load_hf(chunks, hf_config, folder, layout)
    with WeightSync(engine if layout.world_rank == 0 else None, layout, "float32") as sync:
        read = sync.push(blocks(chunks, hf_config, layout), version).bytes_read
    layout.close()
    return read


def megatron_logprobs(folder: Path, samples: list[tuple], dtype: torch.dtype = torch.float32) -> list[list[float]]:
    """Log-probs of each response after its prompt."""
    layout, hf_config = init_layout(ParallelSection()), load_hf_config(folder)
    (chunk,) = build_model(hf_config, layout, ModelOptions(dtype=dtype, init_weights=False, longest_sequence=LONGEST))
    load_hf([chunk], hf_config, folder, layout)
    found = []
    for prompt, response in samples:
        ids = torch.tensor([[*prompt, *response]])
        packed = pack_params(torch.tensor([0, ids.numel()]).int())
        with torch.no_grad():
            logits = chunk(ids, torch.arange(ids.numel())[None], None, packed_seq_params=packed)
        logits = logits[0, len(prompt) - 1 : -1, : TINY_SIZES["vocab_size"]]
        found.append(logits.float().log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
    layout.close()
    return found


def reach_vllm(name: str) -> float:
    """Sync a case to a server, which must then respond as it did after loading the folder; return the largest
    difference of a log-prob between vLLM and Megatron."""
    folder = folder_of(name)
    dtype = EXAMPLES[name].served_dtype
    running = connect(launch(folder, folder.name, dtype=dtype, text_only=name in WRAPPED), folder)
    engine = running.engine

    def answers() -> list[tuple]:
        return [
            (group[0].response_ids.tolist(), group[0].rollout_logprobs.tolist())
            for group in engine.generate(PROMPTS, 1, GREEDY, seed=0)
        ]

    def pushed(source: Path, ranks: int, sizes: dict) -> int:
        read = run_ranks(push, ranks, engine, source, engine.weight_version + 1, sizes)[0]
        engine.weight_version += 1  # the ranks are forks and have their own client
        return read

    try:
        fresh = answers()  # with the weights that vLLM has read from the folder
        pushed(folder_of(name, spoiled=True), 1, {})
        assert answers() != fresh
        model = load_hf_config(folder)
        trained, sizes = tensor_names(model), {key: tensor.nbytes for key, tensor in weights(folder).items()}
        for block in filter(lambda number: model.in_block(number).keys_as_values, range(model.num_layers)):
            for key in filter(lambda found, block=block: f"layers.{block}.self_attn.k_proj." in found, sizes):
                sizes[key] *= 2  # vLLM reads keys that are values for both
        for key in filter(lambda found: found.endswith("conv1d.bias"), sizes):
            sizes[key] *= 2  # vLLM's reload reads biases of convolutions twice
        stages = dict(pp=1) if on_one_stage(name) else {}
        assert pushed(folder, 4, LAYOUT | stages) == sum(
            sizes[tensor_name] for tensor_name in trained & sizes.keys()
        ), "each byte is read once"
        for (ids, logprobs), (expected_ids, expected) in zip(answers(), fresh, strict=True):
            moved = max(abs(one - other) for one, other in zip(logprobs, expected, strict=False))
            assert ids == expected_ids and moved <= EXAMPLES[name].drift, f"{name}: moved by {moved:.1e} in the sync"
    finally:
        running.launcher.stop()
    samples = [(prompt.token_ids, ids) for prompt, (ids, _) in zip(PROMPTS, fresh, strict=True)]
    (expected,) = run_ranks(megatron_logprobs, 1, folder, samples)
    if dtype == "bfloat16":
        return _beyond_rounding(folder, samples, [logprobs for _, logprobs in fresh], expected)
    pairs = ((torch.tensor(logprobs), torch.tensor(e)) for (_, logprobs), e in zip(fresh, expected, strict=True))
    return max((logprobs - reference).abs().max().item() for logprobs, reference in pairs)


def _beyond_rounding(
    folder: Path, samples: list[tuple], served: list[list[float]], expected: list[list[float]]
) -> float:
    """Return 0 if vLLM's log-probs in bfloat16 are as near to Megatron's in float32 as Megatron's own in bfloat16, else
    their mean distance."""
    (rounded,) = run_ranks(megatron_logprobs, 1, folder, samples, torch.bfloat16)

    def mean_distance(found: list[list[float]]) -> float:
        return sum(
            (torch.tensor(one) - torch.tensor(other)).abs().mean().item()
            for one, other in zip(found, expected, strict=True)
        ) / len(expected)

    distance = mean_distance(served)
    return distance if distance > 1.5 * mean_distance(rounded) else 0.0


@pytest.mark.full
@pytest.mark.parametrize("name", SERVED)
def test_a_family_reaches_vllm_exactly_and_both_compute_the_same(name):
    assert reach_vllm(name) <= 1e-4


def push_adapter(engine, folder: Path, merged: Path, lora: LoraSection) -> None:
    """Give the model adapters over ranks, write the merged model to `merged`, and push the adapters alone."""
    layout, hf_config = init_layout(ParallelSection(**LAYOUT)), load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, sequence_parallel=True, own_linears=True))
    attach_adapters(chunks, hf_config, lora, recompute="none")
    load_hf(chunks, hf_config, folder, layout)
    for _, parameter, found in adapter_blocks(chunks, hf_config, layout):
        fill(parameter, found, lambda block: 0.3 * random_tensor(block.name, block.shape)[block.slices])
    save_hf(chunks, hf_config, layout, merged, folder)
    with AdapterSync(engine if layout.world_rank == 0 else None, layout, "float32", lora, str(folder)) as sync:
        sync.push(adapter_blocks(chunks, hf_config, layout), 2)
    layout.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("phi3", {}),  # fused projections
        ("gemma3 multimodal", {}),
        ("qwen3_moe", dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
        ("qwen3_moe", {}),  # dense blocks too
        ("deepseek_v3", dict(target_modules=["q_b_proj", "o_proj"])),
        ("deepseek_v3", dict(target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"])),
        ("deepseek_v3", dict(target_modules=["gate_proj", "up_proj", "down_proj"])),  # dense blocks, shared experts
    ],
)
def test_adapters_reach_vllm(name, chosen, tmp_path):
    folder, lora = folder_of(name), LORA.model_copy(update=chosen)
    options = dict(lora_rank=LORA.rank, lora_modules=_adapted(lora, folder), text_only=name in WRAPPED)
    launcher = launch(folder, f"{folder.name}_adapters", **options)
    try:
        launcher.wait()
        engine = VllmEngine(launcher.urls, lambda ids: "", max_num_seqs=64, logs=launcher.logs, adapters=1)
        run_ranks(push_adapter, 4, engine, folder, tmp_path / "merged", lora)
        engine.weight_version = 2  # the ranks are forks and have their own client
        answers = [
            (group[0].response_ids.tolist(), group[0].rollout_logprobs.tolist())
            for group in engine.generate(PROMPTS, 1, GREEDY, seed=0)
        ]
    finally:
        launcher.stop()
    for prompt, (ids, logprobs) in zip(PROMPTS, answers, strict=True):
        torch.testing.assert_close(
            torch.tensor(logprobs), naive_logprobs(tmp_path / "merged", prompt, ids), atol=1e-4, rtol=0
        )


def write_adapter(folder: Path, merged: Path, out: Path, lora: LoraSection) -> None:
    """Write an adapter of the model to `out`, and the merged model to `merged`."""
    layout, hf_config = init_layout(ParallelSection()), load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, own_linears=True))
    attach_adapters(chunks, hf_config, lora, recompute="none")
    load_hf(chunks, hf_config, folder, layout)
    found = list(adapter_blocks(chunks, hf_config, layout))
    for _, parameter, of_parameter in found:
        fill(parameter, of_parameter, lambda block: 0.3 * random_tensor(block.name, block.shape)[block.slices])
    save_hf(chunks, hf_config, layout, merged, folder)
    save_adapter(found, layout, find_sources(found, layout), out, lora, str(folder), torch.float32)
    layout.close()


@pytest.mark.full
def test_a_server_starts_with_an_adapter_on_a_mixture(tmp_path):
    folder = folder_of("qwen3_moe")
    lora = LORA.model_copy(update=dict(target_modules=["q_proj", "o_proj"]))
    run_ranks(write_adapter, 1, folder, tmp_path / "merged", tmp_path / "adapter", lora)
    launcher = launch(folder, "qwen3_moe_served", extra_args=tuple(adapter_arguments(tmp_path / "adapter")))
    try:
        launcher.wait()
        engine = VllmEngine(launcher.urls, lambda ids: "", max_num_seqs=64, logs=launcher.logs, model=ADAPTER_MODEL)
        groups = engine.generate(PROMPTS, 1, GREEDY, seed=0)
    finally:
        launcher.stop()
    for prompt, (rollout,) in zip(PROMPTS, groups, strict=True):
        expected = naive_logprobs(tmp_path / "merged", prompt, rollout.response_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(rollout.rollout_logprobs.copy()), expected, atol=1e-3, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_is_told_in_its_words(name):
    folder = folder_of(name)
    launcher = launch(folder, folder.name)
    try:
        with pytest.raises(EngineStartError, match=REFUSED[name]):
            launcher.wait()
    finally:
        launcher.stop()
