"""GLM-4.5, 4.6 and Air: part of each head rotated, optional head norms, and the experts of DeepSeek-V3. The layer after
the last decoder layer, which predicts several tokens, is not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.deepseek import beyond
from megagrpo.models.families.dense import DENSE, QK_NORM, QKV_BIAS
from megagrpo.models.families.family import REQUIRED, Family, Raw, Table
from megagrpo.models.families.routed import (
    NORMALIZED,
    ROUTED_BY_BIAS,
    ROUTED_KEYS,
    routed_experts,
    routed_problems,
)
from megagrpo.models.families.wrapper import Wrapper


def _table(hf: HfConfig) -> Table:
    return DENSE | ROUTED_BY_BIAS | (QKV_BIAS if hf.qkv_bias else {}) | (QK_NORM if hf.qk_norm else {})


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    bias, norms = bool(raw.get("attention_bias")), bool(raw.get("use_qk_norm"))
    experts = routed_experts({"first_k_dense_replace": 1} | raw, normalized=True, sigmoid=True, bias=True)
    return replace(common, qkv_bias=bias, qk_norm=norms, experts=experts)


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    table=_table,
    read=_read,
    problems=routed_problems,
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps"),
    # biases on queries, keys and values; the output projection never has one
    keys=(*ROUTED_KEYS, "attention_bias", "use_qk_norm", "num_nextn_predict_layers", "num_mtp_layers"),
    fixed=NORMALIZED | {"tie_word_embeddings": (False, "vLLM's model has an untied LM head")},
    untrained=beyond,
    rope_types=("default", "yarn"),
    partial_rotary_factor=0.5,
    wrappers=(
        Wrapper(
            "glm4v_moe",
            "Glm4vMoeForConditionalGeneration",
            prefix="model.language_model.",
            texts=("glm4v_moe_text",),
            defaults=dict(attention_bias=True),
            required=("use_qk_norm",),
        ),
    ),
)
