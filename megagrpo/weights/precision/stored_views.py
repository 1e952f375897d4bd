"""The views of a folder's tensors that config.json asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.config_keys import architecture_problems, text_config
from megagrpo.families.hf_config import HfConfig, parse_hf_config, table_of
from megagrpo.families.shared.blocks import BlockRule, Local, named
from megagrpo.families.shared.family import Table
from megagrpo.families.shared.precisions import METHOD, QUANTIZATION, precision_problems, quantization
from megagrpo.families.shared.wrapper import NAMINGS
from megagrpo.weights.precision.compressed import OF_COMPRESSED_PRODUCTS, compressed_views
from megagrpo.weights.precision.four_bits import four_bit_views
from megagrpo.weights.precision.view import Get, Scaled, Slices, Stored, View, groups

_DECODERS = "|".join(re.escape(naming.decoder) for naming in NAMINGS)
FUSED_EXPERTS = re.compile(rf"(?:{_DECODERS})layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)")
_EXPERTS = {"gate_up_proj": "mlp.experts.linear_fc1.weight", "down_proj": "mlp.experts.linear_fc2.weight"}
# Names of transformers' other parameters in such blocks -> the parameter in the families' tables.
_BESIDE = {
    "mlp.gate.weight": "mlp.router.weight",
    "block_sparse_moe.router.weight": "mlp.router.weight",
    "mlp.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "mlp.router.expert_bias",
}


# transformers 5 holds experts in memory, and saves them with `save_original_format=False`, as one tensor per block:
# `experts.gate_up_proj` [experts, 2 x width, hidden] and `experts.down_proj` [experts, hidden, width]. Families whose
# own files have the same names with the last two dimensions swapped (Qwen3-VL) get the swapped view.
def fused_views(raw: dict[str, Any], stored: Stored) -> dict[str, View]:
    """Return a view per tensor that the family names in another way; empty when files hold no fused experts."""
    fused = [match for match in map(FUSED_EXPERTS.fullmatch, stored) if match]
    if not fused or architecture_problems(raw):
        return {}
    hf_config = parse_hf_config(raw, stored)
    table = table_of(hf_config)
    views: dict[str, View] = {}
    for match in fused:
        views |= _of_experts(match[0], int(match[1]), table[_EXPERTS[match[2]]], stored[match[0]])
        views |= _swapped(match[0], table[_EXPERTS[match[2]]], stored[match[0]], hf_config)
    for layer in {int(match[1]) for match in fused}:
        views |= _beside(hf_config.file_names.of(f"model.layers.{layer}."), layer, table, stored)
    return {name: view for name, view in views.items() if view.shape != stored.get(name)}


def _swapped(fused: str, rule: BlockRule, shape: tuple[int, ...], hf_config: HfConfig) -> dict[str, View]:
    """Return the view of a tensor [experts, ...] in the family's shape, if that has the last two dimensions swapped."""
    width, hidden = hf_config.mixture.intermediate_size, hf_config.hidden_size
    of_one = (2 * width, hidden) if fused.endswith("gate_up_proj") else (hidden, width)
    wanted = rule.blocks(Local(SimpleNamespace(shape=of_one), 1, 0, hf_config, expert=0))[0].shape
    fits = fused.endswith(rule.names[0].rpartition(".")[2]) and wanted != shape == (*wanted[:-2], *wanted[:-3:-1])
    return {fused: View(None, wanted, (fused,), partial(_turned, fused))} if fits else {}


def _of_experts(fused: str, layer: int, rule: BlockRule, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
    """Yield the views of one fused tensor; the tensors of an expert are `rule.names`, one above the other."""
    patterns = rule.names
    if "{E}" not in patterns[0]:
        yield named(patterns[0], layer, None), View(None, shape, (fused,), partial(_whole, fused))
        return
    experts, rows, columns = shape
    rows //= len(patterns)
    for expert in range(experts):
        for i, pattern in enumerate(patterns):
            read = partial(_read_expert, fused, expert, i * rows)
            yield named(pattern, layer, expert), View(None, (rows, columns), (fused,), read)


def _beside(block: str, layer: int, table: Table, stored: Stored) -> Iterator[tuple[str, View]]:
    for theirs, ours in _BESIDE.items():
        name = block + theirs
        if name in stored and ours in table:
            yield (
                named(table[ours].names[0], layer, None),
                View(None, stored[name], (name,), partial(_whole, name)),
            )


def _turned(name: str, get: Get, slices: Slices) -> Tensor:
    return get(name).transpose(-1, -2)[slices]


def _whole(name: str, get: Get, slices: Slices) -> Tensor:
    return get(name)[slices]


def _read_expert(name: str, expert: int, first: int, get: Get, slices: Slices) -> Tensor:
    rows, columns = slices
    return get(name)[expert, first + rows.start : first + rows.stop, columns]


_BLOCKS, _SCALES = "_blocks", "_scales"
_CODES = 32  # of one exponent
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1; the fourth bit is the sign


# `*_blocks` of gpt-oss's experts holds two codes of 4 bits per byte, `*_scales` one exponent per 32 of them, as in
# `convert_moe_packed_tensors` of transformers.
def mxfp4_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in bfloat16, which holds every value, per tensor of experts [experts, in, out].

    Files hold it as [experts, out, in / 32, 16]. Raises ValueError when exponents do not fit their blocks.
    """
    views = {}
    for blocks, shape in stored.items():
        name = blocks.removesuffix(_BLOCKS)
        if name == blocks or (scales := name + _SCALES) not in stored:
            continue
        if len(shape) != 4 or shape[3] != _CODES // 2 or stored[scales] != shape[:3]:
            said = f"{blocks} has shape {shape} and {scales} {stored[scales]}"
            raise ValueError(f"model: {said}, which is not MXFP4; download the folder again")
        experts, out, groups, _ = shape
        read = partial(_read_mxfp4, blocks, scales)
        views[name] = View(torch.bfloat16, (experts, groups * _CODES, out), (blocks, scales), read)
    return views


def _read_mxfp4(blocks: str, scales: str, get: Get, slices: Slices) -> Tensor:
    experts, inner, out = slices
    first = inner.start // _CODES
    groups = slice(first, -(-inner.stop // _CODES))
    codes, exponents = (get(name)[experts, out, groups] for name in (blocks, scales))
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    shape = tuple(part.stop - part.start for part in slices)
    result = torch.empty(shape, dtype=torch.bfloat16)
    own = slice(inner.start - first * _CODES, inner.stop - first * _CODES)
    for expert in range(shape[0]):  # bounds the memory
        pairs = torch.stack([codes[expert] & 0xF, codes[expert] >> 4], dim=-1).flatten(-2)  # [out, groups, 32]
        exact = torch.ldexp(values[pairs.int()], (exponents[expert].int() - 127)[..., None])
        result[expert] = exact.to(torch.bfloat16).flatten(-2)[:, own].T
    return result


_SCALE = "_scale_inv"
OF_FP8_PRODUCTS = ("activation_scale", "input_scale")  # last parts of the names of tensors that products use


# DeepSeek-V3's and Qwen3's releases hold `weight` and `weight_scale_inv`: inference/fp8_cast_bf16.py of DeepSeek-V3 and
# `Fp8Dequantize` of transformers compute codes times scales in float32.
def fp8_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in `dtype` per weight with a scale. Raises ValueError when a scale fits no blocks of its weight."""
    views = {}
    for scale, grid in stored.items():
        name = scale.removesuffix(_SCALE)
        if name == scale or name not in stored:
            continue
        shape = stored[name]
        block = tuple(config.get("weight_block_size") or shape)
        blocks = tuple(-(-n // size) for n, size in zip(shape, block, strict=False))
        if len(shape) != 2 or (grid != blocks and (blocks != (1, 1) or grid not in ((), (1,)))):
            raise ValueError(
                f"model: {scale} has shape {grid}, but {name} of shape {shape} has {blocks} blocks of {block}; "
                "weight_block_size in config.json belongs to another model"
            )
        views[name] = View(dtype, shape, (name, scale), partial(_read, name, scale, block, dtype))
    return views


def _read(name: str, scale: str, block: tuple[int, int], dtype: torch.dtype, get: Get, slices: Slices) -> Tensor:
    codes, scales = get(name)[slices], get(scale)
    if scales.dim() < 2:  # one
        scales = scales.reshape(-1, 1).float()
    row_groups, column_groups = (groups(part, size) for part, size in zip(slices, block, strict=True))
    return Scaled(lambda rows: codes[rows], scales, row_groups, column_groups, torch.float32).compute(dtype)


def views_of(raw: dict[str, Any], stored: Stored, get: Get) -> dict[str, View]:
    """Return the views of the tensors `stored` in a folder whose config.json is `raw`, by the names of the model. `get`
    reads tensors that describe others.

    Empty for weights that files hold as the family does, and for formats that `precision_problems` refuses. Raises
    ValueError when tensors do not fit the format.
    """
    config = quantization(raw)
    if not config:
        return fused_views(raw, stored)
    if precision_problems(raw):
        return {}
    if raw.get("model_type") != "gpt_oss" and (fused := next(filter(FUSED_EXPERTS.fullmatch, stored), None)):
        said = f"{fused} holds all experts of a block in one tensor, and {QUANTIZATION} is set"
        raise ValueError(f"model: {said}; save one tensor per expert, as the save_pretrained of transformers does")
    text = text_config(raw)
    dtype = getattr(torch, text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    if config[METHOD] == "bitsandbytes":
        return four_bit_views(stored, dtype, get)
    return _VIEWS[config[METHOD]](config, stored, dtype)


_VIEWS = {"fp8": fp8_views, "mxfp4": mxfp4_views, "compressed-tensors": compressed_views}
# Last parts of tensors that quantized products use beside the weights, by method.
_UNUSED = {"fp8": OF_FP8_PRODUCTS, "compressed-tensors": OF_COMPRESSED_PRODUCTS}


def unused(raw: dict[str, Any], views: dict[str, View], stored: Stored) -> set[str]:
    """Return the tensors that only quantized products use: scales of activations."""
    config = quantization(raw)
    names = _UNUSED.get(config[METHOD], ()) if config and views else ()
    return {name for name in stored if name not in views and name.rpartition(".")[2] in names}


def model_tensors(raw: dict[str, Any], stored: Stored, get: Get) -> tuple[dict[str, View], dict[str, str]]:
    """Return the views, and for every tensor of the model the tensor in the files that places it in a file."""
    views = views_of(raw, stored, get)
    hidden = {part for view in views.values() for part in view.parts} | unused(raw, views, stored)
    placed: dict[str, list[str]] = {}
    for name, view in views.items():
        placed.setdefault(view.parts[0], []).append(name)
    origins: dict[str, str] = {}
    for name in stored:
        origins |= dict.fromkeys(placed.get(name, () if name in hidden else (name,)), name)
    return views, origins
