"""A tiny random model of every family, as transformers builds it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

TINY = dict(
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=80,
    vocab_size=127,
    initializer_range=0.1,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN_ROPE = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
LONG_ROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.3], long_factor=[1.0, 3.0, 9.0])
GEMMA = dict(head_dim=24, query_pre_attn_scalar=10, pad_token_id=None)
GEMMA3_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPE = dict(
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
    full_attention=dict(rope_type="linear", rope_theta=1e4, factor=2.0),
)
EXPERTS = dict(head_dim=24, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
# Heads of 16 + 8 elements, values of 12; three of four blocks have experts.
LATENT = dict(
    num_key_value_heads=6,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=32,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
GROUPS = dict(
    n_group=4, topk_group=2, routed_scaling_factor=2.0, rope_parameters=YARN_ROPE | dict(mscale=0.9, mscale_all_dim=0.7)
)
BY_BIAS = dict(scoring_func="sigmoid", topk_method="noaux_tc")
CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # where its name differs from the model's
# Name of the case -> the family in transformers' class names, and its config beyond TINY.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama untied": ("Llama", dict(tie_word_embeddings=False)),
    "llama llama3 rope": ("Llama", dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE)),
    "llama linear rope": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "mistral": ("Mistral", dict(sliding_window=None, head_dim=16)),
    "mistral window": ("Mistral", dict(sliding_window=7, head_dim=16)),
    "qwen2": ("Qwen2", dict()),
    "qwen2 upper windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=24, tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3Moe", dict(**EXPERTS, norm_topk_prob=True, mlp_only_layers=[2], tie_word_embeddings=True)),
    "qwen3_moe, weights not scaled": ("Qwen3Moe", dict(**EXPERTS, norm_topk_prob=False, decoder_sparse_step=2)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "glm": ("Glm", dict(head_dim=16, pad_token_id=0, attention_bias=True)),
    "glm4": ("Glm4", dict(head_dim=16, pad_token_id=0)),
    "glm4 tied, without biases, yarn": (
        "Glm4",
        dict(head_dim=16, pad_token_id=0, tie_word_embeddings=True, attention_bias=False, rope_parameters=YARN_ROPE),
    ),
    "phi3": ("Phi3", dict(tie_word_embeddings=False, pad_token_id=0, sliding_window=9)),
    "phi3 tied, part of the head, longrope": (
        "Phi3",
        dict(
            tie_word_embeddings=True,
            pad_token_id=0,
            partial_rotary_factor=0.375,
            rope_parameters=LONG_ROPE,
            original_max_position_embeddings=64,
        ),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT | GROUPS | dict(q_lora_rank=28, n_shared_experts=2, topk_method="group_limited_greedy"),
    ),
    "deepseek_v2 lite": (
        "DeepseekV2",
        LATENT | dict(q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, rms_norm_eps=1e-2),
    ),
    "deepseek_v3": ("DeepseekV3", LATENT | GROUPS | BY_BIAS | dict(q_lora_rank=28, num_experts_per_tok=3)),
    "gemma2": ("Gemma2", GEMMA | dict(sliding_window=7, attn_logit_softcapping=1.5, final_logit_softcapping=2.0)),
    "gemma3": ("Gemma3", GEMMA | dict(sliding_window=7, rope_parameters=GEMMA3_ROPE, layer_types=GEMMA3_TYPES)),
    "gpt_oss": (
        "GptOss",
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=6, rms_norm_eps=1e-5)
        # Clamps some activations. vLLM requires the names of yarn's bounds.
        | dict(rope_parameters=YARN_ROPE | dict(beta_fast=32.0, beta_slow=1.0, truncate=False), initializer_range=0.2),
    ),
    "qwen3_next": (
        "Qwen3Next",
        EXPERTS
        | dict(
            norm_topk_prob=True,
            shared_expert_intermediate_size=24,
            layer_types=["linear_attention", "full_attention"] * 2,
        )
        | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20),
    ),
    "qwen3 yarn": ("Qwen3", dict(head_dim=24, rope_parameters=YARN_ROPE)),
}


def tiny_config(kind: str, extra: dict[str, Any]) -> transformers.PretrainedConfig:
    """The configuration of a tiny model; `extra` is kept unchanged, because transformers writes rotary parameters into
    it."""
    # Only the eager attention of transformers caps scores.
    return getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(
        **copy.deepcopy(TINY | extra), attn_implementation="eager"
    )


def tiny_model(kind: str, extra: dict[str, Any]) -> torch.nn.Module:
    """Random weights, the same on every call."""
    torch.manual_seed(0)
    config = tiny_config(kind, extra)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        # Norms and biases start as ones and zeros, which hides swapped tensors. Buffers: the biases of expert
        # selection.
        for p in (*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name.endswith("bias"))):
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model
