"""Families with a mixture of experts and no recurrent blocks."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts import latent
from megagrpo.families.parts.llama_table import (
    DENSE,
    GATED_SHARED_EXPERT,
    HAS_HEAD_NORMS,
    QK_NORM,
    QKV_BIAS,
    USUAL_EXPERTS,
    experts,
)
from megagrpo.families.parts.qwen import moe_blocks, window
from megagrpo.families.parts.qwen_omni import QWEN3_OMNI
from megagrpo.families.parts.qwen_vl import QWEN3_VL_MOE, STACKED_EXPERTS
from megagrpo.families.parts.routed import (
    NORMALIZED,
    ROUTED_BY_BIAS,
    ROUTED_KEYS,
    beyond,
    mlp_kind_problems,
    routed_experts,
    routed_problems,
)
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.family import EXPERT_KEYS, REQUIRED, Family, Raw, expert_problems, mixture, rope, windows
from megagrpo.families.shared.wrapper import Wrapper

# Mixtral: a Mistral with a mixture of experts in every block; the weights of a token's experts always sum to 1.
_MIXTRAL_TABLE = DENSE | experts("block_sparse_moe", "w1", "w3", "w2")


def _mixtral_read(raw: Raw, common: HfConfig) -> HfConfig:
    # transformers has other defaults for this family than for Llama.
    norm_eps, theta = raw.get("rms_norm_eps", 1e-5), rope({"rope_theta": 1e6} | raw)["rope_theta"]
    return replace(
        common,
        norm_eps=norm_eps,
        rope_theta=theta,
        experts=mixture(raw),
        windows=windows(raw, raw.get("sliding_window")),
    )


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    table=lambda hf: _MIXTRAL_TABLE,
    read=_mixtral_read,
    problems=expert_problems,
    keys=("sliding_window", *EXPERT_KEYS),
)

# Qwen3-MoE: a Qwen3 with a mixture of experts in some blocks; in all blocks if config.json does not name any.
_HEAD_NORMED = DENSE | QK_NORM | USUAL_EXPERTS


def _qwen3_moe_read(raw: Raw, common: HfConfig) -> HfConfig:
    normalized, size = raw.get("norm_topk_prob", False), raw["moe_intermediate_size"]
    experts = mixture(raw, intermediate_size=size, normalized=normalized, blocks=moe_blocks(raw))
    return replace(common, qk_norm=True, experts=experts, windows=windows(raw, window(raw)))


def _qwen3_moe_problems(raw: Raw) -> list[str]:
    problems = expert_problems(raw, ("moe_intermediate_size",))
    if not problems and "num_hidden_layers" in raw and not moe_blocks(raw):
        problems.append("mlp_only_layers and decoder_sparse_step leave no block with experts; a dense model is a qwen3")
    return problems


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    table=lambda hf: _HEAD_NORMED | (STACKED_EXPERTS if hf.wrapper == QWEN3_VL_MOE else {}),
    read=_qwen3_moe_read,
    problems=_qwen3_moe_problems,
    keys=(
        *(*EXPERT_KEYS, "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),
        *("use_sliding_window", "sliding_window"),
    ),
    ignored=("max_window_layers",),  # all blocks have the window, or no block
    fixed=HAS_HEAD_NORMS,
    wrappers=(QWEN3_VL_MOE, QWEN3_OMNI),
)

# Qwen1.5-MoE and Qwen2-57B-A14B: a Qwen2 with experts and, beside them, an MLP for every token whose output is
# multiplied by a number from the token's own gate.
_QWEN2_MOE_TABLE = DENSE | QKV_BIAS | USUAL_EXPERTS | GATED_SHARED_EXPERT


def _qwen2_moe_read(raw: Raw, common: HfConfig) -> HfConfig:
    moe = QWEN3_MOE.read(raw, common)  # without windows
    shared = raw["shared_expert_intermediate_size"]
    experts = replace(moe.mixture, shared_size=shared, shared_gate=True)
    return replace(moe, qk_norm=False, qkv_bias=True, experts=experts)


_WINDOWS = ("use_sliding_window", "sliding_window")  # vLLM reads none of them here
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    table=lambda hf: _QWEN2_MOE_TABLE,
    read=_qwen2_moe_read,
    problems=QWEN3_MOE.problems,
    required=(*REQUIRED, "shared_expert_intermediate_size"),
    keys=(*(key for key in QWEN3_MOE.keys if key not in _WINDOWS), "shared_expert_intermediate_size"),
    fixed={"qkv_bias": (True, "vLLM's model has biases on queries, keys and values")},
    ignored=("sliding_window", "max_window_layers"),  # without `use_sliding_window`, which is refused
)

# OLMoE: norms of queries and keys over all heads together, and experts in every block.

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    table=lambda hf: _HEAD_NORMED,
    read=lambda raw, common: replace(
        common, qk_norm=True, wide_qk_norm=True, experts=mixture(raw, normalized=False), norm_eps=1e-5
    ),
    problems=expert_problems,
    keys=EXPERT_KEYS,
    fixed=HAS_HEAD_NORMS
    | {
        "clip_qkv": (None, "clipped queries, keys and values are not supported"),
        "tie_word_embeddings": (False, "vLLM's model has an untied LM head"),
        "norm_topk_prob": (False, "vLLM's model does not scale the weights of a token's experts"),
        "rms_norm_eps": (1e-5, "vLLM's model has 1e-5"),
    },
)


# GLM-4.5, 4.6 and Air: part of each head rotated, optional head norms, and the experts of DeepSeek-V3. The layer
# after the last decoder layer, which predicts several tokens, is not trained.
def _glm4_moe_read(raw: Raw, common: HfConfig) -> HfConfig:
    bias, norms = bool(raw.get("attention_bias")), bool(raw.get("use_qk_norm"))
    experts = routed_experts({"first_k_dense_replace": 1} | raw, normalized=True, sigmoid=True, bias=True)
    return replace(common, qkv_bias=bias, qk_norm=norms, experts=experts)


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    table=lambda hf: DENSE | ROUTED_BY_BIAS | (QKV_BIAS if hf.qkv_bias else {}) | (QK_NORM if hf.qk_norm else {}),
    read=_glm4_moe_read,
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

# GLM-4.7-Flash: the latent attention and the experts of DeepSeek-V3. The layer after the last decoder layer, which
# predicts several tokens, is not trained.
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    table=latent.table,
    read=lambda raw, common: latent.read(raw, common, normalized=True, sigmoid=True, bias=True),
    problems=lambda raw: latent.problems(raw) + mlp_kind_problems(raw, default=1),
    # transformers' defaults differ from ours
    required=(*latent.LATENT_REQUIRED, "first_k_dense_replace", "routed_scaling_factor", "rms_norm_eps"),
    # of dense blocks, transformers reads the list alone, and vLLM first_k_dense_replace alone
    keys=(*latent.LATENT_KEYS, "mlp_layer_types", "num_nextn_predict_layers", "num_mtp_layers"),
    fixed=latent.LATENT_FIXED
    | NORMALIZED
    | {
        "topk_method": ("noaux_tc", "only noaux_tc, experts by score and bias, is supported"),
        "scoring_func": ("sigmoid", "only sigmoid is supported"),
        "tie_word_embeddings": (False, "vLLM's model has an untied LM head"),
    },
    untrained=beyond,
    rope_types=("default", "yarn"),
)

# dots.llm1: head norms, and the experts of DeepSeek-V3.
_DOTS1_TABLE = DENSE | QK_NORM | ROUTED_BY_BIAS


def _dots1_read(raw: Raw, common: HfConfig) -> HfConfig:
    upper = windows(raw, raw.get("sliding_window", 4096), lambda block: block >= raw.get("max_window_layers", 62))
    experts = routed_experts(raw, normalized=True, sigmoid=True, bias=True)
    return replace(common, qk_norm=True, experts=experts, windows=upper if any(upper) else ())


def _dots1_problems(raw: Raw) -> list[str]:
    lacks = [] if "norm_topk_prob" in raw else ["config.json lacks norm_topk_prob; set it to true"]
    return lacks + routed_problems(raw)


DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    table=lambda hf: _DOTS1_TABLE,
    read=_dots1_read,
    problems=_dots1_problems,
    keys=(*ROUTED_KEYS, "sliding_window", "max_window_layers", "layer_types"),
    fixed=HAS_HEAD_NORMS | NORMALIZED | {"scoring_func": ("sigmoid", "only sigmoid is supported")},
    ignored=("moe_layer_freq", "topk_method"),  # transformers does not read them
    unserved="vLLM has no class for it since 0.23",
)
