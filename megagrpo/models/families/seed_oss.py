"""Seed-OSS: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import DENSE, QKV_BIAS
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import REQUIRED, Family

FAMILY = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    table=lambda hf: DENSE | (QKV_BIAS if hf.qkv_bias else {}),
    read=lambda raw, common: replace(common, qkv_bias=raw.get("attention_bias", True)),
    required=(*REQUIRED, "head_dim"),  # transformers has a default for it in this family
    keys=("attention_bias",),  # of queries, keys and values; `attention_out_bias` is refused
    # Releases have 0.1, the value of their pretraining. Neither vLLM nor the trainer drops activations.
    ignored=("attention_dropout", "residual_dropout"),
    example=Example(
        models="Seed-OSS-36B",
        differs="biases on queries, keys and values",
        cases={
            "seed_oss": dict(head_dim=24),
            "seed_oss tied, without biases": dict(head_dim=24, tie_word_embeddings=True, attention_bias=False),
        },
        release=dict(
            model_type="seed_oss",
            architectures=["SeedOssForCausalLM"],
            attention_bias=True,
            attention_dropout=0.1,
            attention_out_bias=False,
            bos_token_id=0,
            eos_token_id=2,
            head_dim=128,
            hidden_act="silu",
            hidden_size=5120,
            initializer_range=0.02,
            intermediate_size=27648,
            max_position_embeddings=524288,
            mlp_bias=False,
            num_attention_heads=80,
            num_hidden_layers=64,
            num_key_value_heads=8,
            pad_token_id=1,
            residual_dropout=0.1,
            rms_norm_eps=1e-06,
            rope_scaling=dict(rope_type="default"),
            rope_theta=10000000.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            transformers_version="4.55.0",
            use_cache=True,
            vocab_size=155136,
        ),
    ),
)
