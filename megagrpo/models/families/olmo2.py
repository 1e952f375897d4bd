"""OLMo 2: norms on the outputs of attention and MLP in place of their inputs, and norms of queries and keys over all
heads together."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import POST_NORMED, QK_NORM
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import REQUIRED, Family
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

FAMILY = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    table=lambda hf: POST_NORMED | QK_NORM,
    read=lambda raw, common: replace(common, qk_norm=True, wide_qk_norm=True, pre_norms=False, post_norms=True),
    required=(*REQUIRED, "rms_norm_eps"),  # transformers has another default for it in this family
    fixed=HAS_HEAD_NORMS,
    example=Example(
        models="OLMo 2, 1B to 32B",
        differs="norms after attention and MLP in place of before, norms of queries and keys over all heads",
        cases={
            "olmo2": dict(pad_token_id=0),
            "olmo2 tied, llama3 rope": dict(pad_token_id=0, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
        },
        release=dict(
            model_type="olmo2",
            architectures=["Olmo2ForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            eos_token_id=100257,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=11008,
            max_position_embeddings=4096,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            pad_token_id=100277,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=500000,
            tie_word_embeddings=False,
            torch_dtype="float32",
            transformers_version="4.47.0.dev0",
            use_cache=True,
            vocab_size=100352,
        ),
    ),
)
