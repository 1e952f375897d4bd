"""Models in published precisions: trainer and vLLM compute the same weights from the same folder, and a sync keeps
them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from megagrpo.weights.bridge.load import Checkpoint
from tests.e2e.test_families_vllm import GREEDY, LAYOUT, PROMPTS, folder_of, megatron_logprobs, push
from tests.e2e.tiny_servers import connect, launch


def in_fp8(source: Path, folder: Path) -> Path:
    """A copy with FP8 blocks in the linears of all layers, whose sizes are no multiples of the blocks'."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in [*tensors.items()]:
        if tensor.dim() != 2 or not name.endswith("_proj.weight"):
            tensors[name] = tensor.to(torch.bfloat16) if "bias" not in name else tensor
            continue
        rows, columns = ((torch.arange(n) // 128) for n in tensor.shape)
        scale = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) * 1e-3 + 1e-3
        tensors[name] = (tensor / scale[rows][:, columns]).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantization = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    config = json.loads((folder / "config.json").read_text()) | dict(quantization_config=quantization)
    (folder / "config.json").write_text(json.dumps(config | dict(dtype="bfloat16")))
    return folder


PACKED = {"deepseek_v3": in_fp8}


@pytest.mark.full
@pytest.mark.parametrize("name", PACKED)
def test_vllm_serves_the_weights_that_the_trainer_loads(name, tmp_path, monkeypatch):
    """The server takes its CPU for one with AMX, whose kernels of latent attention take no float32."""
    (tmp_path / "sitecustomize.py").write_text("import torch\n\ntorch.cpu._is_amx_tile_supported = lambda: True\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    torch.manual_seed(1)
    folder = PACKED[name](folder_of(name), tmp_path / name)
    running = connect(launch(folder, f"packed_{name}", packed=True), folder)
    engine = running.engine

    def answers() -> list[tuple]:
        return [
            (group[0].response_ids.tolist(), group[0].rollout_logprobs.tolist())
            for group in engine.generate(PROMPTS, 1, GREEDY, seed=0)
        ]

    try:
        fresh = answers()
        for source, ranks, sizes in ((folder_of(name, spoiled=True), 1, {}), (folder, 4, LAYOUT)):
            read = run_ranks(push, ranks, engine, source, engine.weight_version + 1, sizes)[0]
            engine.weight_version += 1
            if source != folder:
                assert answers() != fresh
        checkpoint = Checkpoint(folder)
        assert read == sum(4 * checkpoint.tensor(tensor).numel() for tensor in checkpoint.where)
        for (ids, logprobs), (expected_ids, expected) in zip(answers(), fresh, strict=True):
            assert ids == expected_ids and logprobs == pytest.approx(expected, rel=0, abs=1e-5)
    finally:
        running.launcher.stop()
    samples = [(prompt.token_ids, ids) for prompt, (ids, _) in zip(PROMPTS, fresh, strict=True)]
    (expected,) = run_ranks(megatron_logprobs, 1, folder, samples)
    for (_, logprobs), theirs in zip(fresh, expected, strict=True):
        assert logprobs == pytest.approx(theirs, rel=0, abs=1e-4)
