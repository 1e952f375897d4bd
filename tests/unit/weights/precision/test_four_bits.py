"""Weights of bitsandbytes in 4 bits are computed as its `dequantize_4bit` does, in any box."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from megagrpo.families.shared.precisions import precision_problems
from megagrpo.weights.bridge.load import Checkpoint
from tests.unit.for_each import for_each
from tests.unit.weights.precision.test_stored_views import BOXES, NAME, block_of, folder_with, same_bits

# The values of bitsandbytes' code 0 to 15.
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334)
NF4 += (-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
NF4 += (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
VALUES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor((*FP4, *(-value for value in FP4)))}
CONFIG = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
SHAPE = (272, 384)


def check(folder, expected):
    from megagrpo.sync.vllm_side.unpacking import unpacked

    assert same_bits(dict(unpacked(folder))[NAME], expected)
    checkpoint = Checkpoint(folder)
    assert list(checkpoint.where) == [NAME]
    assert same_bits(checkpoint.tensor(NAME), expected)
    for box in BOXES:
        assert same_bits(checkpoint.read(block_of(NAME, expected, box)), expected[box])


def four_bits(
    kind: str, nested: bool, shape: tuple[int, int], dtype: str = "bfloat16", name: str = NAME
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random weight as bitsandbytes saves them, and the weight that they stand for, computed block by
    block."""
    generator = torch.Generator().manual_seed(0)
    elements = shape[0] * shape[1]
    codes = torch.randint(0, 16, (elements + elements % 2,), generator=generator, dtype=torch.uint8)
    blocks = -(-elements // 64)
    state = dict(quant_type=kind, blocksize=64, dtype=dtype, shape=list(shape))
    tensors = {"quant_map": VALUES[kind].clone()}
    if nested:
        stored = torch.randint(0, 256, (blocks,), generator=generator, dtype=torch.uint8)
        outer = torch.rand(-(-blocks // 256), generator=generator) * 1e-2
        values = torch.linspace(-1, 1, 256)
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=0.0437)
        tensors |= dict(absmax=stored, nested_absmax=outer, nested_quant_map=values)
        magnitudes = [values[stored[i].item()] * outer[i // 256] + torch.tensor(0.0437) for i in range(blocks)]
    else:
        tensors["absmax"] = torch.rand(blocks, generator=generator) * 0.1
        magnitudes = [*tensors["absmax"]]
    pieces = [VALUES[kind][part.int()] * size for part, size in zip(codes.split(64), magnitudes, strict=False)]
    weight = torch.cat(pieces)[:elements].to(getattr(torch, dtype)).view(shape)
    tensors[f"quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    bytes_of = (codes[::2] << 4 | codes[1::2])[:, None]
    return {name: bytes_of} | {f"{name}.{key}": tensor for key, tensor in tensors.items()}, weight


@for_each("chunk", [2**22, 700])
@for_each("nested", [False, True])
@for_each(("kind", "dtype"), [("nf4", "bfloat16"), ("fp4", "bfloat16"), ("nf4", "float16")])
def test_four_bits_are_bitsandbytes(kind, dtype, nested, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr("megagrpo.weights.precision.view._CHUNK", chunk)
    tensors, expected = four_bits(kind, nested, SHAPE, dtype)
    check(folder_with(tmp_path / "m", CONFIG, {"model.safetensors": tensors}), expected.bfloat16())


def test_bytes_stored_as_another_dtype_and_rows_that_end_inside_a_block_are_read(tmp_path):
    tensors, expected = four_bits("nf4", True, (200, 330))
    tensors[NAME] = tensors[NAME].view(-1, 2).view(torch.bfloat16)  # bnb_4bit_quant_storage, for FSDP
    folder = folder_with(tmp_path / "m", CONFIG, {"model.safetensors": tensors})
    assert torch.equal(Checkpoint(folder).tensor(NAME), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(absmax=None), f"the files lack {NAME}.absmax beside {NAME}.quant_state"),
        (dict(absmax=torch.ones(3)), "3 magnitudes and 16 values; .* needs 52224, 1632 and 16"),
        ({"quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}, "does not describe a matrix in 4 bits"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, said, tmp_path):
    tensors, _ = four_bits("nf4", False, SHAPE)
    tensors |= {f"{NAME}.{key}": tensor for key, tensor in change.items()}
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=said):
        Checkpoint(folder_with(tmp_path / "m", CONFIG, {"model.safetensors": kept})).tensor(NAME)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes"])
def test_other_packed_formats_are_refused_by_name(method):
    config = dict(quant_method=method, load_in_8bit=True)
    (problem,) = precision_problems(dict(model_type="llama", quantization_config=config))
    named = "no load_in_4bit" if method == "bitsandbytes" else f"quant_method={method!r}"
    assert named in problem and problem.endswith("the program that wrote them")
