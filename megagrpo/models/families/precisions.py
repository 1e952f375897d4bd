"""The quantized formats of published weights: which are dequantized on loading, and which are refused. Imports no
torch; `models/precision` reads them."""

from __future__ import annotations

from typing import Any

QUANTIZATION, METHOD = "quantization_config", "quant_method"  # of config.json
_SUPPORTED = "fp8, mxfp4"
_ORIGINAL = "use the original weights, or dequantize them with the program that wrote them"


def precision_problems(raw: dict[str, Any]) -> list[str]:
    """Return why the weights of this config.json cannot be dequantized; empty when they can or are not quantized."""
    config = raw.get(QUANTIZATION)
    if not config:
        return []
    method = config.get(METHOD) if isinstance(config, dict) else None
    if not isinstance(method, str) or method not in _PROBLEMS:
        said = f"config.json has {QUANTIZATION} with {METHOD}={method!r}, quantized weights that cannot be dequantized"
        return [f"{said} exactly (supported: {_SUPPORTED}); {_ORIGINAL}"]
    return [f"config.json has {QUANTIZATION} with {said}; {_ORIGINAL}" for said in _PROBLEMS[method](raw, config)]


def _fp8_problems(raw: dict[str, Any], config: dict[str, Any]) -> list[str]:
    size = config.get("weight_block_size")
    pair = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    problems = [] if size is None or pair else [f"weight_block_size={size!r}, which must be two positive whole numbers"]
    if (kind := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        problems.append(f"fmt={kind!r}; only e4m3 is supported")
    return problems


def _mxfp4_problems(raw: dict[str, Any], config: dict[str, Any]) -> list[str]:
    return [] if raw.get("model_type") == "gpt_oss" else ["mxfp4 weights, whose layout is known for gpt_oss only"]


_PROBLEMS = {"fp8": _fp8_problems, "mxfp4": _mxfp4_problems}
