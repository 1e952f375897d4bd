"""Qwen1.5-MoE and Qwen2-57B-A14B: a Qwen2 with experts and, beside them, an MLP for every token whose output is
multiplied by a number from the token's own gate."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, QKV_BIAS, SHARED_GATE, experts, shared_experts
from megagrpo.models.families.example import Example
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
    example=Example(
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        differs="biases on queries, keys and values, experts, a shared one with a gate",
        cases={
            "qwen2_moe": dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
            | dict(shared_expert_intermediate_size=56),
            "qwen2_moe, some blocks dense, tied": dict(num_experts=8, num_experts_per_tok=2)
            | dict(moe_intermediate_size=32, shared_expert_intermediate_size=56, norm_topk_prob=True)
            | dict(mlp_only_layers=[1], tie_word_embeddings=True),
        },
        release=dict(
            model_type="qwen2_moe",
            architectures=["Qwen2MoeForCausalLM"],
            attention_dropout=0.0,
            bos_token_id=151643,
            decoder_sparse_step=1,
            eos_token_id=151643,
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=5632,
            max_position_embeddings=8192,
            max_window_layers=21,
            moe_intermediate_size=1408,
            norm_topk_prob=False,
            num_attention_heads=16,
            num_experts=60,
            num_experts_per_tok=4,
            num_hidden_layers=24,
            num_key_value_heads=16,
            output_router_logits=False,
            rms_norm_eps=1e-06,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=5632,
            sliding_window=32768,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            transformers_version="4.39.0.dev0",
            use_cache=True,
            use_sliding_window=False,
            vocab_size=151936,
        ),
    ),
)
