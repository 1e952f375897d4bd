"""OLMoE: norms of queries and keys over all heads together, and experts in every block."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, QK_NORM, experts
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import EXPERT_KEYS, Family, Raw, expert_problems, mixture
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

_TABLE = DENSE | QK_NORM | experts("mlp", *GATE_UP_DOWN)


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(common, qk_norm=True, wide_qk_norm=True, experts=mixture(raw, normalized=False), norm_eps=1e-5)


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=expert_problems,
    keys=EXPERT_KEYS,
    fixed=HAS_HEAD_NORMS
    | {
        "clip_qkv": (None, "clipped queries, keys and values are not supported"),
        "tie_word_embeddings": (False, "vLLM's model has an untied LM head"),
        "norm_topk_prob": (False, "vLLM's model does not scale the weights of a token's experts"),
        "rms_norm_eps": (1e-5, "vLLM's model has 1e-5"),
    },
    example=Example(
        models="OLMoE-1B-7B",
        differs="norms of queries and keys over all heads, experts",
        cases={
            "olmoe": dict(num_experts=8, num_experts_per_tok=3, pad_token_id=0, rms_norm_eps=1e-5),
            "olmoe llama3 rope": dict(num_experts=4, num_experts_per_tok=1, pad_token_id=0, rms_norm_eps=1e-5)
            | dict(rope_parameters=LLAMA3_ROPE),
        },
        served=dict(intermediate_size=96),
        release=dict(
            model_type="olmoe",
            architectures=["OlmoeForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            clip_qkv=None,
            eos_token_id=50279,
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=1024,
            max_position_embeddings=4096,
            norm_topk_prob=False,
            num_attention_heads=16,
            num_experts=64,
            num_experts_per_tok=8,
            num_hidden_layers=16,
            num_key_value_heads=16,
            output_router_logits=False,
            pad_token_id=1,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000.0,
            router_aux_loss_coef=0.01,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            transformers_version="4.43.0.dev0",
            use_cache=True,
            vocab_size=50304,
        ),
    ),
)
