"""dots.llm1: head norms, and the experts of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, QK_NORM
from megagrpo.models.families.family import Family, Raw, windows
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.routed import (
    NORMALIZED,
    ROUTED_BY_BIAS,
    ROUTED_KEYS,
    routed_experts,
    routed_problems,
)

_TABLE = DENSE | QK_NORM | ROUTED_BY_BIAS


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    upper = windows(raw, raw.get("sliding_window", 4096), lambda block: block >= raw.get("max_window_layers", 62))
    experts = routed_experts(raw, normalized=True, sigmoid=True, bias=True)
    return replace(common, qk_norm=True, experts=experts, windows=upper if any(upper) else ())


def _problems(raw: Raw) -> list[str]:
    lacks = [] if "norm_topk_prob" in raw else ["config.json lacks norm_topk_prob; set it to true"]
    return lacks + routed_problems(raw)


FAMILY = Family(
    "dots1",
    "Dots1ForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    keys=(*ROUTED_KEYS, "sliding_window", "max_window_layers", "layer_types"),
    fixed=HAS_HEAD_NORMS | NORMALIZED | {"scoring_func": ("sigmoid", "only sigmoid is supported")},
    ignored=("moe_layer_freq", "topk_method"),  # transformers does not read them
    unserved="vLLM has no class for it since 0.23",
)
