"""K-EXAONE: the attention of EXAONE 4 behind norms of its inputs, and the experts of DeepSeek-V3. Layers for predicting
several tokens are not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, MLP, QK_NORM
from megagrpo.models.families.exaone4 import window_problems, windowed
from megagrpo.models.families.family import EXPERT_KEYS, REQUIRED, Family, Raw
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.routed import (
    NORMALIZED,
    ROUTED,
    ROUTED_KEYS,
    mlp_kind_problems,
    routed_experts,
    routed_problems,
)

_TABLE = DENSE | QK_NORM | ROUTED | {"mlp.router.expert_bias": same(MLP + "e_score_correction_bias")}
_DENSE_BLOCKS = 1  # transformers' default of first_k_dense_replace


def _usual(raw: Raw) -> Raw:
    """Return config.json with the usual names of the numbers of experts."""
    scale = raw.get("routed_scaling_factor", 2.5)
    names = dict(n_routed_experts=raw.get("num_experts"), n_shared_experts=raw.get("num_shared_experts", 1))
    dense = raw.get("first_k_dense_replace", _DENSE_BLOCKS)
    return raw | names | dict(routed_scaling_factor=scale, first_k_dense_replace=dense)


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    experts = routed_experts(_usual(raw), normalized=True, sigmoid=True, bias=True)
    return replace(windowed(raw, common), experts=experts)


FAMILY = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    classes=("ExaoneMoEForCausalLM",),
    table=lambda hf: _TABLE,
    read=_read,
    problems=lambda raw: window_problems(raw) + routed_problems(_usual(raw)) + mlp_kind_problems(_usual(raw), 1),
    required=(*REQUIRED, "num_key_value_heads", "rms_norm_eps"),
    keys=(
        *(*ROUTED_KEYS, *EXPERT_KEYS, "num_shared_experts", "mlp_layer_types"),
        *("sliding_window", "layer_types"),
    ),
    # `layer_types` and `mlp_layer_types` decide
    ignored=("sliding_window_pattern", "is_moe_layer", "num_nextn_predict_layers", "topk_method"),
    fixed=HAS_HEAD_NORMS | NORMALIZED | {"scoring_func": ("sigmoid", "only sigmoid is supported")},
    untrained=lambda hf: (r"mtp\..+",),
)
