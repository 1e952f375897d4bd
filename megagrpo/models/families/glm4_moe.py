"""GLM-4.5, 4.6 and Air: part of each head rotated, optional head norms, and the experts of DeepSeek-V3. The layer after
the last decoder layer, which predicts several tokens, is not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.deepseek import beyond
from megagrpo.models.families.dense import DENSE, QK_NORM, QKV_BIAS
from megagrpo.models.families.example import TINY_GLM_VISION, YARN, Example
from megagrpo.models.families.family import REQUIRED, Family, Raw, Table
from megagrpo.models.families.routed import (
    NORMALIZED,
    ROUTED_BY_BIAS,
    ROUTED_KEYS,
    TINY_ROUTED,
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


_TINY: Raw = TINY_ROUTED | dict(head_dim=16, norm_topk_prob=True, pad_token_id=0)
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
    example=Example(
        models="GLM-4.5, 4.5-Air, 4.6",
        differs="as `dots1`, half of each head rotated, biases on queries, keys and values",
        cases={
            "glm4_moe": _TINY | dict(attention_bias=True, n_group=1, topk_group=1),
            "glm4_moe head norms, groups, yarn": _TINY | dict(use_qk_norm=True, rope_parameters=YARN),
        },
        wrapped={
            "glm4v_moe": TINY_GLM_VISION | dict(text_config=TINY_GLM_VISION["text_config"] | dict(use_qk_norm=False))
        },
        drift=1e-5,  # vLLM's last bits depend on the other prompts of a batch
        release=dict(
            model_type="glm4_moe",
            architectures=["Glm4MoeForCausalLM"],
            attention_bias=True,
            attention_dropout=0.0,
            eos_token_id=[151329, 151336, 151338],
            first_k_dense_replace=1,
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=10944,
            max_position_embeddings=131072,
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=128,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_attention_heads=96,
            num_experts_per_tok=8,
            num_hidden_layers=46,
            num_key_value_heads=8,
            num_nextn_predict_layers=1,
            pad_token_id=151329,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=1000000,
            routed_scaling_factor=1.0,
            tie_word_embeddings=False,
            topk_group=1,
            torch_dtype="bfloat16",
            transformers_version="4.54.0",
            use_cache=True,
            use_qk_norm=False,
            vocab_size=151552,
        ),
    ),
)
