"""The views of a folder's tensors that config.json asks for."""

from __future__ import annotations

from typing import Any

import torch

from megagrpo.families.config_keys import text_config
from megagrpo.families.shared.precisions import METHOD, QUANTIZATION, precision_problems, quantization
from megagrpo.weights.precision.compressed import OF_COMPRESSED_PRODUCTS, compressed_views
from megagrpo.weights.precision.four_bits import four_bit_views
from megagrpo.weights.precision.fused_experts import FUSED_EXPERTS, fused_views
from megagrpo.weights.precision.mxfp4 import mxfp4_views
from megagrpo.weights.precision.scaled_weights import OF_FP8_PRODUCTS, fp8_views
from megagrpo.weights.precision.view import Get, Stored, View


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
