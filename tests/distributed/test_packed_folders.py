"""A folder in AWQ, GPTQ or NF4 is the model of its formula: logits, exports and config.json."""

from __future__ import annotations

import json

import pytest
import torch
from family_proofs import check_model, read_folder
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_families import MODELS, tiny_model

from megagrpo.families.weight_sources import SINGLE
from tests.unit.weights.precision.test_four_bits import four_bits
from tests.unit.weights.precision.test_packed_integers import along_inputs, along_outputs

SIZE = 32
AWQ_ORDER, GPTQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7), tuple(range(8))
CONFIG = dict(bits=4, load_in_4bit=True, group_size=SIZE, version="gemm", zero_point=True, sym=False)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes [inputs, outputs], zero points and scales [groups, outputs] of a matrix [outputs, inputs], and the matrix
    that they stand for."""
    groups = weight.T.float().unflatten(0, (-1, SIZE))
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15).int()
    codes = ((groups / scales.float()[:, None]) + zeros[:, None]).round().clamp(0, 15).int()
    matrix = ((codes - zeros[:, None]).half() * scales[:, None]).flatten(0, 1).T.contiguous()
    return codes.flatten(0, 1), zeros, scales, matrix


@pytest.mark.parametrize("kind", ["awq", "gptq", "bitsandbytes"])
def test_a_folder_of_packed_weights_is_the_model_of_its_formula(kind, tmp_path):
    name, extra = MODELS["llama untied"]
    tiny_model(name, extra | dict(intermediate_size=96, head_dim=16)).half().save_pretrained(tmp_path / "plain")
    plain, packed = load_file(tmp_path / "plain" / SINGLE), {}
    for tensor, weight in list(plain.items()):
        if weight.dim() != 2 or "layers" not in tensor:
            packed[tensor] = weight
            continue
        if kind == "bitsandbytes":
            tensors, plain[tensor] = four_bits("nf4", True, tuple(weight.shape), "float16", tensor)
            packed |= tensors
            continue
        codes, zeros, scales, plain[tensor] = quantized(weight)
        awq, module = kind == "awq", tensor.removesuffix("weight")
        words = along_outputs(codes, 4, AWQ_ORDER) if awq else along_inputs(codes, 4)
        stored = along_outputs(zeros, 4, AWQ_ORDER) if awq else along_outputs((zeros - 1) % 16, 4, GPTQ_ORDER)
        packed |= {f"{module}qweight": words, f"{module}qzeros": stored, f"{module}scales": scales}
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "packed").mkdir()
    for folder, tensors in (("plain", plain), ("packed", packed)):
        save_file(tensors, tmp_path / folder / SINGLE, {"format": "pt"})
    config = raw | dict(quantization_config=CONFIG | dict(quant_method=kind))
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    expected, found = (
        run_ranks(check_model, 1, tmp_path / folder, tmp_path / f"{folder} out", {}, 10**9)
        for folder in ("plain", "packed")
    )
    assert all((ours == theirs).all() for ours, theirs in zip(found[0][0], expected[0][0], strict=True))
    made = read_folder(tmp_path / "packed out")
    assert made.keys() == plain.keys() and all(torch.equal(made[tensor], plain[tensor]) for tensor in plain)
    assert json.loads((tmp_path / "packed out" / "config.json").read_text()) == raw
