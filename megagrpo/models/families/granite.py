"""Granite 3: a Llama with four scales, of the embedding, the attention scores, the residual branches and the logits."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import Family, Raw

SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
TINY_SCALES: Raw = dict(
    embedding_multiplier=3.0, attention_multiplier=0.17, residual_multiplier=0.6, logits_scaling=1.5
)


def scaled(raw: Raw, common: HfConfig) -> HfConfig:
    """Return the architecture with the scales of config.json; an absent scale is 1, that of the scores too."""
    embedding, attention, residual, logits = (raw.get(key, 1.0) for key in SCALES)
    return replace(
        common, embedding_scale=embedding, softmax_scale=attention, residual_scale=residual, logit_scale=1 / logits
    )


def scale_problems(raw: Raw) -> list[str]:
    """Return scales with invalid values."""
    scales = {key: raw[key] for key in SCALES if key in raw}
    wrong = {key: value for key, value in scales.items() if not isinstance(value, (int, float)) or value <= 0}
    return [f"{key} is {value!r} in config.json; it must be a number above 0" for key, value in wrong.items()]


FAMILY = Family(
    "granite",
    "GraniteForCausalLM",
    table=lambda hf: DENSE,
    read=scaled,
    problems=scale_problems,
    keys=SCALES,
    example=Example(
        models="Granite 3.0 to 3.3, 2B and 8B",
        differs="scales of embedding, scores, residual branches and logits",
        cases={
            "granite": TINY_SCALES,
            "granite tied, llama3 rope": TINY_SCALES | dict(tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
        },
        release=dict(
            model_type="granite",
            architectures=["GraniteForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            attention_multiplier=0.0078125,
            bos_token_id=0,
            embedding_multiplier=12.0,
            eos_token_id=0,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=12800,
            logits_scaling=16.0,
            max_position_embeddings=131072,
            mlp_bias=False,
            num_attention_heads=32,
            num_hidden_layers=40,
            num_key_value_heads=8,
            pad_token_id=0,
            residual_multiplier=0.22,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000000.0,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            transformers_version="4.47.0",
            use_cache=True,
            vocab_size=49159,
        ),
    ),
)
