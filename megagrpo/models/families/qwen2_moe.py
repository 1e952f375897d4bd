"""Qwen1.5-MoE and Qwen2-57B-A14B: a Qwen2 with experts and, beside them, an MLP for every token whose output is
multiplied by a number from the token's own gate."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, QKV_BIAS, SHARED_GATE, experts, shared_experts
from megagrpo.models.families.family import REQUIRED, Family, Raw
from megagrpo.models.families.qwen3 import QWEN3_MOE

_TABLE = DENSE | QKV_BIAS | experts("mlp", *GATE_UP_DOWN) | shared_experts("shared_expert") | SHARED_GATE


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    moe = QWEN3_MOE.read(raw, common)  # without windows
    shared = raw["shared_expert_intermediate_size"]
    experts = replace(moe.mixture, shared_size=shared, shared_gate=True)
    return replace(moe, qk_norm=False, qkv_bias=True, experts=experts)


_WINDOWS = ("use_sliding_window", "sliding_window")  # vLLM reads none of them here
FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=QWEN3_MOE.problems,
    required=(*REQUIRED, "shared_expert_intermediate_size"),
    keys=(*(key for key in QWEN3_MOE.keys if key not in _WINDOWS), "shared_expert_intermediate_size"),
    fixed={"qkv_bias": (True, "vLLM's model has biases on queries, keys and values")},
    ignored=("sliding_window", "max_window_layers"),  # without `use_sliding_window`, which is refused
)
