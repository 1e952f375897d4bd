"""ERNIE 4.5, dense: a Llama that rotates neighbouring dimensions of each head."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import REQUIRED, Family, Raw, rope

ERNIE_FIXED = {
    "use_bias": (False, "biases in the linears are not supported"),
    "rope_interleaved": (True, "this family rotates neighbouring dimensions"),
}


def ernie_config(raw: Raw, common: HfConfig) -> HfConfig:
    """Return what the ERNIE families share. config.json may leave out default values."""
    return replace(
        common,
        rotary_interleaved=True,
        tied_embeddings=raw.get("tie_word_embeddings", True),
        rope_theta=rope({"rope_theta": 500000.0} | raw)["rope_theta"],
        norm_eps=raw.get("rms_norm_eps", 1e-5),
    )


FAMILY = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    table=lambda hf: DENSE,
    read=ernie_config,
    required=(*REQUIRED, "head_dim"),  # transformers has a default for it in this family
    fixed=ERNIE_FIXED,
    ignored=("attention_dropout",),  # transformers ignores it too
    example=Example(
        models="ERNIE-4.5-0.3B",
        differs="rotation of neighbouring dimensions",
        cases={
            "ernie4_5": dict(head_dim=16, tie_word_embeddings=False),
            "ernie4_5 tied": dict(head_dim=16, tie_word_embeddings=True),
        },
        release=dict(
            model_type="ernie4_5",
            architectures=["Ernie4_5ForCausalLM"],
            bos_token_id=1,
            eos_token_id=2,
            head_dim=128,
            hidden_act="silu",
            hidden_size=1024,
            intermediate_size=3072,
            max_position_embeddings=131072,
            num_attention_heads=16,
            num_hidden_layers=18,
            num_key_value_heads=2,
            pad_token_id=0,
            rms_norm_eps=1e-05,
            rope_theta=500000.0,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            transformers_version="4.54.0",
            use_bias=False,
            use_cache=False,
            vocab_size=103424,
        ),
    ),
)
