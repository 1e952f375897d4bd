"""dots.llm1: head norms, and the experts of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, QK_NORM
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import SLIDING, Family, Raw, windows
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.routed import (
    NORMALIZED,
    ROUTED_BY_BIAS,
    ROUTED_KEYS,
    TINY_ROUTED,
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
    example=Example(
        models="dots.llm1",
        differs="head norms, experts, some of them shared, also chosen by a bias, windows",
        cases={
            "dots1": TINY_ROUTED | dict(norm_topk_prob=True, n_group=1, topk_group=1, head_dim=16),
            "dots1 groups, windows, tied": TINY_ROUTED
            | dict(norm_topk_prob=True, sliding_window=7, layer_types=["full_attention", SLIDING] * 2)
            | dict(head_dim=16, tie_word_embeddings=True),
        },
        release=dict(
            model_type="dots1",
            architectures=["Dots1ForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            first_k_dense_replace=1,
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=10944,
            max_position_embeddings=32768,
            max_window_layers=62,
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=128,
            n_shared_experts=2,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_experts_per_tok=6,
            num_hidden_layers=62,
            num_key_value_heads=32,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000000,
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
            sliding_window=None,
            tie_word_embeddings=False,
            topk_group=1,
            torch_dtype="bfloat16",
            transformers_version="4.46.3",
            use_cache=True,
            vocab_size=152064,
        ),
    ),
)
