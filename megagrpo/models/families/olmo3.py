"""OLMo 3: an OLMo 2 with a window in three of four blocks, which rotate by unscaled angles."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families import olmo2
from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.example import YARN, Example
from megagrpo.models.families.family import FULL, SLIDING, Raw, rope, windows

_THETA = 500000.0  # transformers' base where config.json names none, and always of blocks with a window


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    local = ((raw.get("rope_parameters") or {}).get(SLIDING) or {}).get("rope_theta", _THETA)
    return replace(
        olmo2.FAMILY.read(raw, common),
        windows=windows(raw, raw["sliding_window"], lambda block: (block + 1) % 4 != 0),
        rope_theta=rope({"rope_theta": _THETA} | raw)["rope_theta"],
        local_rope_theta=local,
    )


def _problems(raw: Raw) -> list[str]:
    local = (raw.get("rope_parameters") or {}).get(SLIDING) or {}
    kind = local.get("rope_type", "default")
    return [] if kind == "default" else [f"rope_type {kind!r} in blocks with a window is not supported"]


_TINY: Raw = dict(pad_token_id=0, sliding_window=7, layer_types=[SLIDING, SLIDING, FULL, SLIDING])
FAMILY = replace(
    olmo2.FAMILY,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    read=_read,
    problems=_problems,
    required=(*olmo2.FAMILY.required, "sliding_window"),
    keys=("sliding_window", "layer_types"),
    local_rope=True,
    example=Example(
        models="OLMo 3, 7B and 32B",
        differs="as `olmo2`, with windows, whose blocks rotate by unscaled angles",
        cases={
            "olmo3": _TINY,
            "olmo3 yarn": _TINY
            | dict(
                rope_parameters={
                    FULL: YARN | dict(attention_factor=1.2),
                    SLIDING: dict(rope_type="default", rope_theta=100.0),
                }
            ),
        },
        release=dict(
            model_type="olmo3",
            architectures=["Olmo3ForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=None,
            dtype="bfloat16",
            eos_token_id=100257,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=11008,
            layer_types=([SLIDING] * 3 + [FULL]) * 8,
            max_position_embeddings=65536,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            pad_token_id=100277,
            rms_norm_eps=1e-06,
            rope_scaling=dict(
                attention_factor=1.2079441541679836,
                beta_fast=32.0,
                beta_slow=1.0,
                factor=8.0,
                original_max_position_embeddings=8192,
                rope_type="yarn",
            ),
            rope_theta=500000,
            sliding_window=4096,
            tie_word_embeddings=False,
            transformers_version="4.57.0",
            use_cache=False,
            vocab_size=100278,
        ),
    ),
)
