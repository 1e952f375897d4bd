"""Arcee's AFM: a Llama whose MLP has no gate and squares the ReLU."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import DENSE, UNGATED
from megagrpo.models.families.example import YARN, Example
from megagrpo.models.families.family import REQUIRED, Family

FAMILY = Family(
    "arcee",
    "ArceeForCausalLM",
    table=lambda hf: DENSE | UNGATED,
    read=lambda raw, common: replace(common, activation="relu2"),
    required=(*REQUIRED, "rms_norm_eps"),
    fixed={"hidden_act": ("relu2", "only relu2 is supported for this family")},
    example=Example(
        models="AFM-4.5B",
        differs="an MLP without a gate, squared ReLU",
        cases={
            "arcee": dict(hidden_act="relu2", pad_token_id=0),
            "arcee tied, wide heads, yarn": dict(hidden_act="relu2", head_dim=24, pad_token_id=0)
            | dict(tie_word_embeddings=True, rope_parameters=YARN),
        },
        release=dict(
            model_type="arcee",
            architectures=["ArceeForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=128000,
            eos_token_id=128001,
            head_dim=128,
            hidden_act="relu2",
            hidden_size=2560,
            initializer_range=0.02,
            intermediate_size=18432,
            max_position_embeddings=65536,
            mlp_bias=False,
            num_attention_heads=20,
            num_hidden_layers=36,
            num_key_value_heads=4,
            rms_norm_eps=1e-05,
            rope_scaling=dict(
                beta_fast=32.0,
                beta_slow=1.0,
                factor=20.0,
                mscale=1.0,
                original_max_position_embeddings=4096,
                rope_type="yarn",
            ),
            rope_theta=10000.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            transformers_version="4.53.0",
            use_cache=True,
            vocab_size=128004,
        ),
    ),
)
