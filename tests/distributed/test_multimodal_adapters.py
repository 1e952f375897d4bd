"""Adapters of a multimodal model's text model have the names that PEFT gives them, and leave the tower alone."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from suites import usual
from tiny_families import EVERY, class_of, tiny_model

from megagrpo.config import LoraSection, ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.lora.lora_layers import attach_adapters
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_tensor
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, fill
from megagrpo.weights.bridge.adapter_files import load_adapter, read_lora, save_adapter
from megagrpo.weights.bridge.hf_export import find_sources, save_hf
from megagrpo.weights.bridge.load import load_hf

NAMES = ("gemma3 multimodal", "qwen3_5 multimodal", "qwen3_vl multimodal")
EXPERTS = dict(target_modules=["o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def write(model: Path, root: Path, lora: LoraSection) -> None:
    """Write an adapter, the merged model, and the adapter again after `load_adapter`."""
    layout, hf_config = init_layout(ParallelSection(tp=2)), load_hf_config(model)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, own_linears=True))
    attach_adapters(chunks, hf_config, lora, recompute="none")
    load_hf(chunks, hf_config, model, layout)
    found = list(adapter_blocks(chunks, hf_config, layout))
    for _, parameter, blocks in found:
        fill(parameter, blocks, lambda block: 0.3 * random_tensor(block.name, block.shape)[block.slices])
    save_hf(chunks, hf_config, layout, root / "merged", model)
    sources = find_sources(found, layout)
    save_adapter(found, layout, sources, root / "adapter", lora, str(model), torch.float32)
    for _, parameter, _ in found:
        parameter.data.zero_()
    load_adapter(chunks, hf_config, layout, root / "adapter", read_lora(root / "adapter"))
    save_adapter(found, layout, sources, root / "again", lora, str(model), torch.float32)
    layout.close()


def logits_with_peft(model: Path, root: Path) -> tuple[float, list[str]]:
    """The largest difference of logits between PEFT and the merged model; names of PEFT's tensors."""
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    def logits(whole: torch.nn.Module) -> torch.Tensor:
        return getattr(whole, "thinker", whole)(ids).logits  # a model that speaks has no forward of its own

    ids = torch.arange(40)[None]
    whole, merged = (AutoModelForMultimodalLM.from_pretrained(folder).eval() for folder in (model, root / "merged"))
    with torch.no_grad():
        plain = logits(whole)
        adapted = PeftModel.from_pretrained(whole, root / "adapter").eval()
        found, expected = logits(whole), logits(merged)
    assert (found - plain).abs().max() > 0.1
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    return (found - expected).abs().max().item(), names


@pytest.mark.parametrize("name", usual(NAMES, 0))
@pytest.mark.parametrize(
    "modules", usual(["all-linear", ["q_proj", "down_proj"], r"model\.language_model\..*\.o_proj"], 0)
)
def test_peft_reads_the_adapter_of_a_multimodal_model(name, modules, tmp_path):
    compare_with_peft(name, LoraSection(rank=4, alpha=6.0, target_modules=modules), tmp_path)


@pytest.mark.full
def test_peft_reads_the_adapter_of_a_thinker(tmp_path):
    attention = LoraSection(rank=4, alpha=6.0, target_modules=["q_proj", "o_proj"])  # PEFT converts those of MLPs
    beside = tuple(f"base_model.model.{part}." for part in ("talker", "code2wav", "thinker.audio_tower"))
    compare_with_peft("qwen3_omni_moe multimodal", attention, tmp_path, beside)  # there PEFT adds adapters of zeros


@pytest.mark.full
def test_peft_reads_the_adapters_of_stacked_experts(tmp_path):
    compare_with_peft("qwen3_vl_moe multimodal", LoraSection(rank=4, alpha=6.0, **EXPERTS), tmp_path)


def compare_with_peft(name: str, lora: LoraSection, tmp_path: Path, beside: tuple[str, ...] = ()) -> None:
    """Assert that PEFT computes with an adapter as transformers with the merged model, and has the same adapters but
    those whose names begin with `beside`."""
    class_of(EVERY[name][0])
    model = tmp_path / "model"
    run_ranks(lambda: tiny_model(*EVERY[name]).save_pretrained(model), 1)
    run_ranks(write, 2, model, tmp_path, lora)
    ((difference, names),) = run_ranks(logits_with_peft, 1, model, tmp_path)
    assert difference < 1e-4
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.replace(".default", "") for name in names if not name.startswith(beside)} == written.keys()
    decoders = tuple(f"base_model.model.{decoder}.layers." for decoder in ("model.language_model", "thinker.model"))
    assert all(name.startswith(decoders) for name in written)
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == written.keys() and all(torch.equal(again[name], written[name]) for name in written)
