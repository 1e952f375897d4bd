"""Code World Model: a Llama with windows, in three of four blocks if config.json names none."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import FULL, REQUIRED, SLIDING, Family, Raw, windows

_RELEASE: Raw = dict(model_type="cwm", architectures=["CwmForCausalLM"], hidden_size=6144, num_hidden_layers=64)
_RELEASE |= dict(intermediate_size=21504, num_attention_heads=48, num_key_value_heads=8, head_dim=128)
_RELEASE |= dict(vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1000000.0)
_RELEASE |= dict(rope_scaling=LLAMA3_ROPE | dict(factor=16.0, rope_theta=1e6, original_max_position_embeddings=8192))
_RELEASE |= dict(sliding_window=8192, layer_types=([FULL] + [SLIDING] * 3) * 16, tie_word_embeddings=False)
_RELEASE |= dict(hidden_act="silu", attention_dropout=0.0, mlp_bias=False, torch_dtype="bfloat16")


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(common, windows=windows(raw, raw["sliding_window"], lambda block: block % 4 != 0))


FAMILY = Family(
    "cwm",
    "CwmForCausalLM",
    table=lambda hf: DENSE,
    read=_read,
    problems=lambda raw: [] if raw.get("sliding_window") else ["config.json lacks sliding_window"],
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window"),
    keys=("sliding_window", "layer_types"),
    ignored=("pretraining_tp",),
    rope_types=("llama3",),  # the rotation of a file without one is llama3 too, with transformers' own factors
    example=Example(
        models="CWM 32B",
        differs="as `llama`, windows",
        cases={
            "cwm": dict(head_dim=24, sliding_window=7, rope_parameters=LLAMA3_ROPE, layer_types=None),
            "cwm own blocks": dict(head_dim=24, sliding_window=5, rope_parameters=LLAMA3_ROPE)
            | dict(layer_types=[SLIDING, FULL, FULL, SLIDING], tie_word_embeddings=True),
        },
        release=_RELEASE,
    ),
)
