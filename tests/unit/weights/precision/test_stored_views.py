"""Packed weights are computed exactly as the code that defines their format does, in any box."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.precisions import precision_problems
from megagrpo.families.weight_sources import INDEX
from megagrpo.weights.bridge.hf_files import carry, files_of
from megagrpo.weights.bridge.load import Checkpoint
from tests.unit.for_each import for_each

FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
NAME = "model.layers.0.mlp.up_proj.weight"
SHAPES = [(256, 128), (200, 330), (1, 1), (127, 129), (576, 7)]
BOXES = [(slice(0, 1), slice(0, 1)), (slice(100, 190), slice(0, 330)), (slice(128, 200), slice(127, 257))]


def folder_with(folder: Path, quantization: dict | None, files: dict[str, dict[str, Tensor]], **config) -> Path:
    """A folder with the files, and a config.json with this `quantization_config`."""
    folder.mkdir(parents=True)
    raw = dict(model_type="deepseek_v3", torch_dtype="bfloat16", quantization_config=quantization) | config
    (folder / "config.json").write_text(json.dumps(raw))
    for name, tensors in files.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})
    if len(files) > 1:
        where = {key: name for name, tensors in files.items() for key in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return folder


def fp8_tensors(shape: tuple[int, int], block: tuple[int, int] = (128, 128), scales=torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    grid = [-(-n // size) for n, size in zip(shape, block, strict=True)]
    codes = (torch.randn(shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {NAME: codes, f"{NAME}_scale_inv": (torch.rand(grid) * 1e-3).to(scales)}


def weight_dequant(x: Tensor, s: Tensor, block_size: int = 128) -> Tensor:
    """The kernel of DeepSeek-V3's inference/kernel.py, element by block: x in float32 times s, stored in bfloat16."""
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    for i in range(0, x.shape[0], block_size):
        for j in range(0, x.shape[1], block_size):
            box = slice(i, i + block_size), slice(j, j + block_size)
            y[box] = (x[box].float() * s[i // block_size, j // block_size]).to(torch.bfloat16)
    return y


def same_bits(one: Tensor, other: Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))


def block_of(name: str, tensor: Tensor, slices: tuple[slice, ...]) -> Block:
    """The part `slices` of a tensor as a block."""
    bounds = [part.indices(n)[:2] for part, n in zip(slices, tensor.shape, strict=True)]
    box = tuple(low for low, _ in bounds), tuple(high for _, high in bounds)
    return Block(name, tuple(tensor.shape), box, tuple(tensor.shape), 0, 0, 1)


@for_each("shape", SHAPES)
@for_each("chunk", [2**22, 700])
def test_fp8_blocks_are_deepseeks(shape, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr("megagrpo.weights.precision.view._CHUNK", chunk)
    tensors = fp8_tensors(shape)
    checkpoint = Checkpoint(folder_with(tmp_path / "m", FP8, {"model.safetensors": tensors}))
    expected = weight_dequant(*tensors.values())
    assert list(checkpoint.where) == [NAME]
    assert same_bits(checkpoint.tensor(NAME), expected)
    assert (checkpoint.entry(NAME).dtype, checkpoint.entry(NAME).shape) == (torch.bfloat16, shape)
    for box in BOXES:
        block = block_of(NAME, expected, box)
        assert same_bits(checkpoint.read(block), expected[box])


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(128, 128), (64, 16), None])
def test_fp8_blocks_are_those_of_transformers(scales, block, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    shape = (256, 384)
    tensors = fp8_tensors(shape, block or shape, scales)
    if block is None:
        tensors[f"{NAME}_scale_inv"] = tensors[f"{NAME}_scale_inv"].reshape(())
    config = FP8 | dict(weight_block_size=block)
    extra = {NAME.replace("weight", "activation_scale"): torch.ones(())}
    checkpoint = Checkpoint(folder_with(tmp_path / "m", config, {"model.safetensors": tensors | extra}))
    codes, scale = tensors.values()
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale.reshape(scale.shape or (1, 1)), torch.bfloat16)
    assert list(checkpoint.where) == [NAME]
    assert same_bits(checkpoint.tensor(NAME), expected)


MXFP4 = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def mxfp4_tensors(name: str, experts: int, inner: int, out: int) -> dict[str, Tensor]:
    """Every code occurs; the exponents go beyond the subnormal numbers of bfloat16, not beyond its largest."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (experts, out, inner // 32, 16), dtype=torch.uint8)
    scales = torch.randint(0, 252, (experts, out, inner // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


@pytest.mark.parametrize(("inner", "out"), [(32, 2), (96, 130), (160, 7)])
def test_mxfp4_is_that_of_transformers(inner, out, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = mxfp4_tensors(EXPERTS, 3, inner, out)
    bias = {f"{EXPERTS}_bias": torch.ones(3, out, dtype=torch.bfloat16)}
    files = {"model.safetensors": tensors | bias}
    checkpoint = Checkpoint(folder_with(tmp_path / "m", MXFP4, files, model_type="gpt_oss"))
    expected = convert_moe_packed_tensors(*tensors.values())
    assert checkpoint.where.keys() == {EXPERTS, *bias}
    assert same_bits(checkpoint.tensor(EXPERTS), expected)
    for box in [(1, 3, 0, inner, 0, out), (2, 3, 5, 31, 1, 2), (0, 1, inner - 7, inner, 0, out), (0, 2, 9, 32, 0, 1)]:
        slices = tuple(slice(*box[i : i + 2]) for i in (0, 2, 4))
        assert same_bits(checkpoint.read(block_of(EXPERTS, expected, slices)), expected[slices])


def test_mxfp4_with_other_exponents_is_named(tmp_path):
    tensors = mxfp4_tensors(EXPERTS, 3, 64, 6)
    tensors[f"{EXPERTS}_scales"] = tensors[f"{EXPERTS}_scales"][:, :, :1]
    folder = folder_with(tmp_path / "m", MXFP4, {"model.safetensors": tensors}, model_type="gpt_oss")
    with pytest.raises(ValueError, match=r"gate_up_proj_blocks has shape .* which is not MXFP4"):
        Checkpoint(folder)


def compressed_config(**weights) -> dict:
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32) | weights
    kind = "pack-quantized" if weights.pop("packed", True) else "naive-quantized"
    group = dict(targets=["Linear"], weights=weights, input_activations=None, output_activations=None)
    return dict(quant_method="compressed-tensors", format=kind, config_groups=dict(group_0=group), ignore=["lm_head"])


def compressed_tensors_of(
    config: dict, shape: tuple[int, int], scales: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors that the package's compressor writes for a random weight, and the weight that it reads from them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    torch.manual_seed(0)
    scheme = QuantizationScheme(targets=["Linear"], weights=config["config_groups"]["group_0"]["weights"])
    args = scheme.weights
    strategy = str(getattr(args.strategy, "value", args.strategy))
    per_scale = dict(tensor=shape, channel=(1, shape[1]), group=(1, args.group_size), block=args.block_structure)
    grid = [-(-n // size) for n, size in zip(shape, per_scale[strategy], strict=True)]
    weight, scale = torch.randn(shape), (torch.rand(grid) + 0.5) * 0.1
    state = dict(weight=weight.to(scales), weight_scale=scale.to(scales))
    if strategy == "tensor":
        state["weight_scale"] = state["weight_scale"].reshape(1)
    if not args.symmetric:
        limit = 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-limit, limit, grid).to(torch.int8)
    if args.actorder is not None:
        state["weight_g_idx"] = torch.randperm(shape[1]).int() // args.group_size
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    stored = compressor.compress(state, scheme)
    module = NAME.removesuffix("weight")
    tensors = {module + name: tensor for name, tensor in stored.items()}
    return tensors, compressor.decompress(stored, scheme)["weight"]


FLOAT = dict(packed=False, num_bits=8, type="float", group_size=None)
COMPRESSED = {
    "int4 in groups": dict(),
    "int4 in groups with zero points": dict(symmetric=False),
    "int4 in ordered groups": dict(actorder="group"),
    "int4 in ordered groups with zero points": dict(actorder="group", symmetric=False),
    "int4 per row": dict(strategy="channel", group_size=None),
    "int4 per row with zero points": dict(strategy="channel", group_size=None, symmetric=False),
    "int3": dict(num_bits=3),
    "int8 packed": dict(num_bits=8, group_size=64),
    "int8": dict(num_bits=8, packed=False, strategy="channel", group_size=None),
    "int8 with zero points": dict(num_bits=8, packed=False, strategy="channel", group_size=None, symmetric=False),
    "fp8 per tensor": FLOAT | dict(strategy="tensor"),
    "fp8 per row": FLOAT | dict(strategy="channel"),
    "fp8 in blocks": FLOAT | dict(strategy="block", block_structure=[64, 32]),
}


@for_each("scales", [torch.bfloat16, torch.float32])
@for_each("name", COMPRESSED)
def test_compressed_tensors_are_those_of_the_package(name, scales, tmp_path):
    shape = (192, 320)
    config = compressed_config(**COMPRESSED[name])
    tensors, expected = compressed_tensors_of(config, shape, scales)
    extra = {NAME.replace("weight", "input_scale"): torch.ones(1)}
    checkpoint = Checkpoint(folder_with(tmp_path / "m", config, {"model.safetensors": tensors | extra}))
    expected = expected.to(torch.bfloat16)
    assert list(checkpoint.where) == [NAME]
    assert same_bits(checkpoint.tensor(NAME), expected)
    for box in [
        *BOXES[:1],
        (slice(100, 190), slice(0, 320)),
        (slice(67, 69), slice(61, 203)),
        (slice(0, 192), slice(3, 4)),
    ]:
        assert same_bits(checkpoint.read(block_of(NAME, expected, box)), expected[box])


def test_int4_of_other_shapes_is_named(tmp_path):
    config = compressed_config()
    tensors, _ = compressed_tensors_of(config, (64, 96), torch.bfloat16)
    shape = {NAME.replace("weight", "weight_shape"): torch.tensor([64, 90])}
    checkpoint = Checkpoint(folder_with(tmp_path / "m", config, {"model.safetensors": tensors | shape}))
    with pytest.raises(ValueError, match=r"up_proj.weight_shape is \[64, 90\], but words and scales are of"):
        checkpoint.tensor(NAME)
    with pytest.raises(
        ValueError, match=r"weight_scale has shape \(64, 3\), but the \(64, 96\) weight has .*\(64, 6\)"
    ):
        Checkpoint(folder_with(tmp_path / "n", compressed_config(group_size=16), {"model.safetensors": tensors}))


def test_scales_that_fit_no_blocks_are_named(tmp_path):
    tensors = fp8_tensors((200, 330), (64, 64))
    folder = folder_with(tmp_path / "m", FP8, {"model.safetensors": tensors})
    with pytest.raises(ValueError, match=r"up_proj.weight_scale_inv has shape \(4, 6\), but .* has \(2, 3\) blocks"):
        Checkpoint(folder)


def test_quantized_and_fused_experts_are_refused(tmp_path):
    fused = {"model.layers.3.mlp.experts.gate_up_proj": torch.zeros(2, 4, 4)}
    folder = folder_with(tmp_path / "m", FP8, {"model.safetensors": fused})
    with pytest.raises(ValueError, match=r"layers.3.mlp.experts.gate_up_proj holds all experts .* save one tensor per"):
        Checkpoint(folder)


def test_a_broken_scale_is_named(tmp_path):
    tensors = fp8_tensors((200, 330))
    tensors[f"{NAME}_scale_inv"][1, 2] = float("inf")
    checkpoint = Checkpoint(folder_with(tmp_path / "m", FP8, {"model.safetensors": tensors}))
    with pytest.raises(ValueError, match=r"up_proj.weight in .* holds"):
        checkpoint.read(block_of(NAME, tensors[NAME], (slice(150, 200), slice(300, 330))))


def test_an_export_has_the_files_of_the_model_unpacked(tmp_path):
    tensors = fp8_tensors((200, 330))
    norm = {"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    weight, scale = ({name: tensor} for name, tensor in tensors.items())
    only_scales = {"c.safetensors": scale}  # a file of the model without a tensor of its own
    source = folder_with(tmp_path / "m", FP8, {"a.safetensors": norm | weight, **only_scales})
    files = files_of(source)
    assert [file.name for file in files.files] == ["a.safetensors"]
    assert {name: (one.dtype, one.shape) for name, one in files.entries.items()} == {
        "model.norm.weight": (torch.bfloat16, (4,)),
        NAME: (torch.bfloat16, (200, 330)),
    }
    index = json.loads(files.index)
    assert index["weight_map"] == dict.fromkeys(files.entries, "a.safetensors")
    assert index["metadata"]["total_size"] == 2 * (4 + 200 * 330)
    (tmp_path / "hf").mkdir()
    carry(source, files, tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert files_of(tmp_path / "hf").entries == files.entries


@for_each(
    ("config", "said"),
    [
        (dict(quant_method="hqq", bits=4), "quant_method='hqq', quantized weights that cannot be dequantized exactly"),
        (dict(bits=4), "quant_method=None"),
        ([1], "quant_method=None"),
        (MXFP4, "mxfp4 weights, whose layout is known for gpt_oss only"),
        (compressed_config(num_bits=9), "weights of type 'int' with 9 bits; supported"),
        (compressed_config(type="float", num_bits=4), "weights of type 'float' with 4 bits"),
        (compressed_config(strategy="token"), "strategy='token'; supported: tensor"),
        (compressed_config(group_size=None), "group_size=None"),
        (compressed_config(symmetric=None), "symmetric=None"),
        (compressed_config(**FLOAT | dict(strategy="block")), "block_structure=None"),
        (compressed_config(**FLOAT | dict(strategy="channel", packed=True)), "packed weights that are no integers"),
        (compressed_config() | dict(format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'; supported"),
        (compressed_config() | dict(sparsity_config=dict(format="sparse-24-bitmask")), "sparsity_config={'format'"),
        (compressed_config() | dict(config_groups={}), "config_groups={}"),
        (compressed_config() | dict(config_groups=dict(a=dict(weights=None))), "a group without quantized weights"),
        (FP8 | dict(fmt="e5m2"), "fmt='e5m2'; only e4m3 is supported"),
        (FP8 | dict(weight_block_size=[128]), "weight_block_size=[128], which must be two positive whole numbers"),
    ],
)
def test_other_formats_are_refused_by_name(config, said):
    (problem,) = precision_problems(dict(model_type="llama", quantization_config=config))
    assert said in problem and problem.endswith("the program that wrote them")


def test_vllm_reads_the_same_bits(tmp_path):
    from megagrpo.sync.vllm_side.unpacking import unpacked

    tensors = fp8_tensors((200, 330)) | {"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    scale = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_inv")}
    folder = folder_with(tmp_path / "m", FP8, {"a.safetensors": tensors, "b.safetensors": scale})
    checkpoint, found = Checkpoint(folder), dict(unpacked(folder))
    assert found.keys() == checkpoint.where.keys()
    assert all(same_bits(found[name], checkpoint.tensor(name)) for name in found)
    assert load_file(folder / "a.safetensors")[NAME].dtype == torch.float8_e4m3fn


def test_experts_of_qwen3_vl_load_as_released_and_as_transformers_saves_them(tmp_path):
    text = dict(model_type="qwen3_vl_moe_text", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=3)
    text |= dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    config = dict(model_type="qwen3_vl_moe", text_config=text, torch_dtype="float32")
    experts = "model.language_model.layers.0.mlp.experts."
    released = {f"{experts}gate_up_proj": torch.randn(2, 8, 6), f"{experts}down_proj": torch.randn(2, 3, 8)}
    saved = {name: tensor.mT.contiguous() for name, tensor in released.items()}
    folders = [
        folder_with(tmp_path / name, None, {"model.safetensors": tensors}, **config)
        for name, tensors in (("released", released), ("saved", saved))
    ]
    assert not Checkpoint(folders[0]).views
    for folder in folders:
        checkpoint = Checkpoint(folder)
        for name, tensor in released.items():
            assert torch.equal(checkpoint.tensor(name), tensor) and checkpoint.entry(name).shape == tensor.shape
            part = block_of(name, tensor, (slice(1, 2), slice(1, 3), slice(2, 5)))
            assert torch.equal(checkpoint.read(part), tensor[1:2, 1:3, 2:5])
    from megagrpo.sync.vllm_side.unpacking import unpacked

    assert all(torch.equal(tensor, released[name]) for name, tensor in unpacked(folders[1]))
