"""K-EXAONE: the attention of EXAONE 4 behind norms of its inputs, and the experts of DeepSeek-V3. Layers for predicting
several tokens are not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, MLP, QK_NORM
from megagrpo.models.families.example import Example
from megagrpo.models.families.exaone4 import window_problems, windowed
from megagrpo.models.families.family import EXPERT_KEYS, FULL, REQUIRED, SLIDING, Family, Raw
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.routed import (
    DENSE_MLP,
    NORMALIZED,
    ROUTED,
    ROUTED_KEYS,
    SPARSE_MLP,
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


_TINY: Raw = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, num_shared_experts=2, head_dim=24)
_TINY |= dict(first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.0, norm_topk_prob=True)
_TINY |= dict(layer_types=[SLIDING, SLIDING, FULL, SLIDING], sliding_window=7, rope_theta=1e4, pad_token_id=0)
_RELEASE: Raw = dict(model_type="exaone_moe", architectures=["ExaoneMoEForCausalLM"], hidden_act="silu", head_dim=128)
_RELEASE |= dict(hidden_size=6144, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=48)
_RELEASE |= dict(num_attention_heads=64, num_key_value_heads=8, vocab_size=153600, max_position_embeddings=262144)
_RELEASE |= dict(num_experts=128, num_experts_per_tok=8, num_shared_experts=1, routed_scaling_factor=2.5)
_RELEASE |= dict(n_group=1, topk_group=1, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc")
_RELEASE |= dict(first_k_dense_replace=1, mlp_layer_types=[DENSE_MLP] + [SPARSE_MLP] * 47, sliding_window=128)
_RELEASE |= dict(layer_types=([SLIDING] * 3 + [FULL]) * 12, sliding_window_pattern="LLLG", rope_theta=1000000)
_RELEASE |= dict(is_moe_layer=[False] + [True] * 47, num_nextn_predict_layers=1, rms_norm_eps=1e-5, dtype="bfloat16")
_RELEASE |= dict(attention_dropout=0.0, initializer_range=0.02, tie_word_embeddings=False)
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
    example=Example(
        models="K-EXAONE 236B-A23B",
        differs="as `exaone4`, norms before attention and MLP, experts, some of them shared, also chosen by a bias",
        cases={
            "exaone_moe": _TINY,
            "exaone_moe, one group, tied": _TINY
            | dict(n_group=1, topk_group=1, layer_types=[FULL, SLIDING] * 2)
            | dict(tie_word_embeddings=True),
        },
        drift=1e-5,  # as of glm4_moe
        release=_RELEASE,
    ),
)
