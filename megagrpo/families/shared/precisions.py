"""The quantized formats of published weights: which are dequantized on loading, and which are refused. Imports no
torch; `weights/precision` reads them."""

from __future__ import annotations

from typing import Any

QUANTIZATION, METHOD = "quantization_config", "quant_method"  # of config.json
TEXT_CONFIG = "text_config"  # of a multimodal config.json
_SUPPORTED = "fp8, mxfp4, compressed-tensors, bitsandbytes in 4 bits"
_ORIGINAL = "use the original weights, or dequantize them with the program that wrote them"


def quantization(raw: dict[str, Any]) -> Any:
    """Return the quantization of this config.json, or of its text model, which Kimi K2.5 names inside; None without."""
    text = raw.get(TEXT_CONFIG)
    return raw.get(QUANTIZATION) or (text.get(QUANTIZATION) if isinstance(text, dict) else None) or None


def precision_problems(raw: dict[str, Any]) -> list[str]:
    """Return why the weights of this config.json cannot be dequantized; empty when they can or are not quantized."""
    config = quantization(raw)
    if not config:
        return []
    method = config.get(METHOD) if isinstance(config, dict) else None
    if not isinstance(method, str) or method not in _PROBLEMS:
        said = f"config.json has {QUANTIZATION} with {METHOD}={method!r}, quantized weights that cannot be dequantized"
        return [f"{said} exactly (supported: {_SUPPORTED}); {_ORIGINAL}"]
    return [f"config.json has {QUANTIZATION} with {said}; {_ORIGINAL}" for said in _PROBLEMS[method](raw, config)]


def _fp8_problems(raw: dict[str, Any], config: dict[str, Any]) -> list[str]:
    size = config.get("weight_block_size")
    problems = (
        []
        if size is None or _is_pair(size)
        else [f"weight_block_size={size!r}, which must be two positive whole numbers"]
    )
    if (kind := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        problems.append(f"fmt={kind!r}; only e4m3 is supported")
    return problems


def _mxfp4_problems(raw: dict[str, Any], config: dict[str, Any]) -> list[str]:
    return [] if raw.get("model_type") == "gpt_oss" else ["mxfp4 weights, whose layout is known for gpt_oss only"]


# Formats of compressed-tensors; all but the last hold a code per element.
_FORMATS = ("naive-quantized", "float-quantized", "int-quantized", "pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")


def _compressed_problems(raw: dict[str, Any], config: dict[str, Any]) -> list[str]:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()) or not groups:
        return [f"config_groups={groups!r}, which must name the quantized weights"]
    formats = {group.get("format") or config.get("format") for group in groups.values()}
    problems = [f"format={one!r}; supported: {', '.join(_FORMATS)}" for one in sorted(map(str, formats - {*_FORMATS}))]
    for key in ("sparsity_config", "transform_config"):
        other = config.get(key) or {}
        if other and other.get("format") != "dense":
            problems.append(f"{key}={other!r}, which is not supported")
    weights = [group.get("weights") for group in groups.values()]
    if any(not isinstance(one, dict) for one in weights):
        return [*problems, "a group without quantized weights"]
    keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
    if len({repr([one.get(key) for key in keys]) for one in weights}) > 1:
        problems.append("groups whose weights differ in bits, strategy or size")
    return problems + _weight_problems(weights[0], formats)


def _weight_problems(weights: dict[str, Any], formats: set[Any]) -> list[str]:
    strategy, bits, kind = (weights.get(key) for key in ("strategy", "num_bits", "type"))
    size, block, symmetric = (weights.get(key) for key in ("group_size", "block_structure", "symmetric"))
    problems = [] if strategy in _STRATEGIES else [f"strategy={strategy!r}; supported: {', '.join(_STRATEGIES)}"]
    if strategy == "group" and (type(size) is not int or size < 1):
        problems.append(f"group_size={size!r}, which must be a positive whole number")
    if strategy == "block" and not _is_pair(block):
        problems.append(f"block_structure={block!r}, which must be two positive whole numbers")
    if type(symmetric) is not bool:
        problems.append(f"symmetric={symmetric!r}, which must be true or false")
    if (kind, bits) != ("float", 8) and not (kind == "int" and type(bits) is int and 1 <= bits <= 8):
        problems.append(f"weights of type {kind!r} with {bits!r} bits; supported: int of 1 to 8 bits, float of 8")
    elif "pack-quantized" in formats and kind != "int":
        problems.append("packed weights that are no integers")
    return problems


def _is_pair(size: Any) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)


def _bitsandbytes_problems(raw: dict[str, Any], config: dict[str, Any]) -> list[str]:
    return [] if config.get("load_in_4bit") else ["no load_in_4bit; only weights in 4 bits are dequantized"]


_PROBLEMS = {
    "fp8": _fp8_problems,
    "mxfp4": _mxfp4_problems,
    "compressed-tensors": _compressed_problems,
    "bitsandbytes": _bitsandbytes_problems,
}
