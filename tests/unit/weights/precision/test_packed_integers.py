"""Weights of AWQ, GPTQ and LLM.int8() are computed as the kernels of their formats do, in any box."""

from __future__ import annotations

import json

import pytest
import torch

from megagrpo.families.shared.precisions import precision_problems
from megagrpo.weights.bridge.load import Checkpoint
from tests.unit.for_each import for_each
from tests.unit.weights.precision.test_stored_views import BOXES, NAME, block_of, folder_with, same_bits

MODULE = NAME.removesuffix(".weight")
OUTPUTS, INPUTS, SIZE = 272, 384, 128


def quantized(bits: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [inputs, outputs], zero points and scales [groups, outputs]; every code and zero point occurs."""
    generator = torch.Generator().manual_seed(seed)
    groups = INPUTS // size
    codes = torch.randint(0, 2**bits, (INPUTS, OUTPUTS), generator=generator, dtype=torch.int32)
    zeros = torch.randint(0, 2**bits, (groups, OUTPUTS), generator=generator, dtype=torch.int32)
    return codes, zeros, (torch.rand((groups, OUTPUTS), generator=generator) * 1e-2).half()


def by_hand(codes, zeros, scales, order, dtype=torch.bfloat16):
    """The matrix [outputs, inputs], one input after the other."""
    rows = [(codes[i] - zeros[group]).half() * scales[group] for i, group in enumerate(order.tolist())]
    return torch.stack(rows, 1).to(dtype)


def along_inputs(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Words of neighbouring rows, as `pack` of AutoGPTQ makes them."""
    per_word = 32 // bits
    words = torch.zeros(codes.shape[0] // per_word, codes.shape[1], dtype=torch.int64)
    for i in range(codes.shape[0]):
        words[i // per_word] |= codes[i].long() << bits * (i % per_word)
    return words.to(torch.int32)


def along_outputs(codes: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """Words of neighbouring columns: place i of a word has column `order[i]`."""
    words = torch.zeros(codes.shape[0], codes.shape[1] * bits // 32, dtype=torch.int64)
    for column in range(words.shape[1]):
        for place, one in enumerate(order):
            words[:, column] |= codes[:, column * len(order) + one].long() << bits * place
    return words.to(torch.int32)


def check(folder, expected):
    from megagrpo.sync.vllm_side.unpacking import unpacked

    assert same_bits(dict(unpacked(folder))[NAME], expected)
    checkpoint = Checkpoint(folder)
    assert list(checkpoint.where) == [NAME]
    assert same_bits(checkpoint.tensor(NAME), expected)
    for box in BOXES:
        assert same_bits(checkpoint.read(block_of(NAME, expected, box)), expected[box])


@pytest.mark.parametrize("chunk", [2**22, 700])
@pytest.mark.parametrize("size", [SIZE, -1])
def test_awq_is_its_formula(chunk, size, tmp_path, monkeypatch):
    monkeypatch.setattr("megagrpo.weights.precision.view._CHUNK", chunk)
    groups = INPUTS if size == -1 else size
    codes, zeros, scales = quantized(4, groups)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # of AutoAWQ's WQLinear_GEMM
    tensors = {"qweight": along_outputs(codes, 4, order), "qzeros": along_outputs(zeros, 4, order), "scales": scales}
    config = dict(quant_method="awq", bits=4, group_size=size, version="gemm", zero_point=True)
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    folder = folder_with(tmp_path / "m", config, {"model.safetensors": named})
    check(folder, by_hand(codes, zeros, scales, torch.arange(INPUTS) // groups))


@for_each("bits", [2, 4, 8])
@for_each("second", [False, True])
@for_each("ordered", [False, True])
def test_gptq_is_its_formula(bits, second, ordered, tmp_path):
    codes, zeros, scales = quantized(bits, SIZE)
    order = torch.arange(INPUTS) // SIZE
    if ordered:
        order = order[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
    plain = tuple(range(32 // bits))
    stored = zeros if second else (zeros - 1) % 2**bits
    tensors = {"qweight": along_inputs(codes, bits), "qzeros": along_outputs(stored, bits, plain), "scales": scales}
    tensors["g_idx"] = order.int()
    config = dict(quant_method="gptq", bits=bits, group_size=SIZE, desc_act=ordered, sym=False, dynamic={})
    config |= dict(checkpoint_format="gptq_v2") if second else {}
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    folder = folder_with(tmp_path / "m", config, {"model.safetensors": named})
    check(folder, by_hand(codes, zeros, scales, order))


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_vllms_own_packing_is_read(kind, tmp_path):
    from vllm.model_executor.layers.quantization.utils import quant_utils

    codes, zeros, scales = quantized(4, SIZE)
    tensors = dict(scales=scales)
    if kind == "awq":
        tensors["qweight"] = quant_utils.awq_pack(codes, 4, INPUTS, OUTPUTS)
        tensors["qzeros"] = quant_utils.awq_pack(zeros, 4, len(zeros), OUTPUTS)
    else:
        tensors["qweight"] = quant_utils.gptq_pack(codes, 4, INPUTS, OUTPUTS)
        tensors["qzeros"] = quant_utils.pack_cols((zeros - 1) % 16, 4, len(zeros), OUTPUTS)
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    config = dict(quant_method=kind, bits=4, group_size=SIZE)
    folder = folder_with(tmp_path / "m", config, {"model.safetensors": named})
    check(folder, by_hand(codes, zeros, scales, torch.arange(INPUTS) // SIZE))


@pytest.mark.parametrize("stored", [7, 8])
def test_symmetric_zero_points_are_half_of_the_codes_in_both_versions(stored, tmp_path):
    codes, zeros, scales = quantized(4, SIZE)  # some files name the first version and store the second's zero points
    plain, zeros = tuple(range(8)), torch.full_like(zeros, stored)
    tensors = {"qweight": along_inputs(codes, 4), "qzeros": along_outputs(zeros, 4, plain), "scales": scales}
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    config = dict(quant_method="gptq", bits=4, group_size=SIZE, sym=True)
    folder = folder_with(tmp_path / "m", config, {"model.safetensors": named})
    check(folder, by_hand(codes, torch.full_like(zeros, 8), scales, torch.arange(INPUTS) // SIZE))
    named[f"{MODULE}.qzeros"] = along_outputs(zeros - 2, 4, plain)
    folder = folder_with(tmp_path / "n", config, {"model.safetensors": named})
    with pytest.raises(ValueError, match="zero points other than 8, but quantization_config has sym=true"):
        Checkpoint(folder).tensor(NAME)


def test_int8_rows_are_bitsandbytes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (OUTPUTS, INPUTS), generator=generator, dtype=torch.int8)
    largest = torch.rand(OUTPUTS, generator=generator)
    tensors = {NAME: codes, f"{MODULE}.SCB": largest, f"{NAME}_format": torch.tensor(0, dtype=torch.uint8)}
    config = dict(quant_method="bitsandbytes", load_in_8bit=True, load_in_4bit=False)
    folder = folder_with(tmp_path / "m", config, {"model.safetensors": tensors})
    check(folder, (codes * (largest.view(-1, 1) * 0.007874015718698502)).bfloat16())


def test_words_of_another_model_are_refused(tmp_path):
    codes, zeros, scales = quantized(4, SIZE)
    plain = tuple(range(8))
    tensors = {"qweight": along_inputs(codes, 4), "qzeros": along_outputs(zeros, 4, plain), "scales": scales}
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    config = dict(quant_method="gptq", bits=4, group_size=64)
    folder = folder_with(tmp_path / "m", config, {"model.safetensors": named})
    with pytest.raises(ValueError, match="quantization_config belongs to another model"):
        Checkpoint(folder).tensor(NAME)
    del named[f"{MODULE}.qzeros"]
    folder = folder_with(tmp_path / "n", config, {"model.safetensors": named})
    with pytest.raises(ValueError, match=f"the files lack {MODULE}.qzeros beside"):
        Checkpoint(folder).tensor(NAME)


@for_each(
    ("config", "said"),
    [
        (dict(quant_method="awq", bits=8), "bits=8; supported: 4"),
        (dict(quant_method="awq", bits=4, version="gemv"), "version='gemv', another order of the codes"),
        (dict(quant_method="awq", bits=4, zero_point=False), "zero_point=False; only weights with zero points"),
        (dict(quant_method="gptq", bits=3), "bits=3; supported: 2, 4, 8"),
        (dict(quant_method="gptq", bits=4, group_size=0), "group_size=0, which must be"),
        (dict(quant_method="gptq", bits=4, checkpoint_format="marlin"), "checkpoint_format='marlin'; supported"),
        (dict(quant_method="gptq", bits=4, dynamic={"-:.*": {}}), "dynamic={'-:.*': {}}, other bits"),
        (dict(quant_method="bitsandbytes"), "neither load_in_8bit nor load_in_4bit"),
    ],
)
def test_other_layouts_are_refused_by_name(config, said):
    (problem,) = precision_problems(dict(model_type="llama", quantization_config=json.loads(json.dumps(config))))
    assert said in problem and problem.endswith("the program that wrote them")
