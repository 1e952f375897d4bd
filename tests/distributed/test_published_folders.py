"""Folders as they are published, in FP8 blocks and with code beside them, load and are exported without an edit."""

from __future__ import annotations

import json

import pytest
import torch
from family_proofs import check_model, num_ranks, read_folder
from ranks import run_ranks
from safetensors.torch import save_file
from suites import usual
from tiny_families import EVERY, tiny_model

from megagrpo.families.weight_sources import SINGLE

BLOCK = 32
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])
KIMI = dict(
    model_type="kimi_k2",
    auto_map={
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
)
KEPT = ("gate.weight", "embed_tokens.weight", "lm_head.weight")  # matrices that releases leave in bfloat16
CASES = {
    "kimi_k2": ("deepseek_v3", KIMI, dict(tp=2, ep=2, sequence_parallel=True)),
    "minimax_m2": ("minimax_m2", {}, dict(tp=2, ep=2, etp=1, sequence_parallel=True)),
    "deepseek_v32": ("deepseek_v32", {}, dict(pp=2, ep=2)),
    "kimi_k25": ("kimi_k25 multimodal", {}, dict(tp=2, ep=2, sequence_parallel=True)),
}


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, a scale per block."""
    grid = [-(-n // BLOCK) for n in weight.shape]
    scales, codes = torch.empty(grid), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            box = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = weight[box].abs().max().float() / 448
            codes[box] = (weight[box].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def unpacked(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrix by the formula: code times scale of its block in float32, rounded to bfloat16."""
    scale = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: codes.shape[0], : codes.shape[1]]
    return (codes.float() * scale).to(torch.bfloat16)


def quantized(raw: dict) -> dict:
    """config.json of the release; the one of Kimi K2.5 names the quantization in text_config."""
    key = dict(quantization_config=FP8)
    return raw | (dict(text_config=raw["text_config"] | key) if "text_config" in raw else key)


@pytest.mark.full
@pytest.mark.parametrize("kind", usual(CASES, 0))
def test_a_release_loads_in_layouts_and_keeps_its_config_json(kind, tmp_path):
    case, changes, sizes = CASES[kind]
    tiny_model(*EVERY[case]).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    raw = json.loads((tmp_path / "plain" / "config.json").read_text()) | changes
    plain, release = read_folder(tmp_path / "plain"), {}
    for name, tensor in list(plain.items()):
        release[name] = tensor
        if tensor.dim() == 2 and not name.endswith(KEPT) and "vision" not in name and "mm_projector" not in name:
            release[name], release[f"{name}_scale_inv"] = codes, scales = packed(tensor)
            plain[name] = unpacked(codes, scales)
    for folder, tensors, config in (("plain", plain, raw), ("release", release, quantized(raw))):
        (tmp_path / folder).mkdir(exist_ok=True)
        save_file(tensors, tmp_path / folder / SINGLE, {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        for module in {path.partition(".")[0] for path in config.get("auto_map", {}).values()}:
            (tmp_path / folder / f"{module}.py").write_text("raise SystemExit('the code ran')")
    expected = run_ranks(check_model, 1, tmp_path / "plain", tmp_path / "plain out", {}, 10**9)
    found = run_ranks(check_model, 1, tmp_path / "release", tmp_path / "alone", {}, 10**9)
    for ours, theirs in zip(found[0][0], expected[0][0], strict=True):
        assert (ours == theirs).all()
    run_ranks(check_model, num_ranks(sizes), tmp_path / "release", tmp_path / "out", sizes, 10**9)
    for out in ("alone", "out"):
        made = read_folder(tmp_path / out)
        assert made.keys() == plain.keys()
        assert all(torch.equal(made[name], plain[name]) for name in plain)
        assert json.loads((tmp_path / out / "config.json").read_text()) == raw
