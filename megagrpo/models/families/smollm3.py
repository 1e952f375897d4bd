"""SmolLM3: a Llama with blocks that do not rotate queries and keys, every fourth one if config.json names none."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import FULL, Family, Raw, rope


def rotates(raw: Raw) -> list[int]:
    """Return, for each block, 1 if it rotates queries and keys, else 0."""
    every = raw.get("no_rope_layer_interval", 4)
    return raw.get("no_rope_layers") or [int((block + 1) % every != 0) for block in range(raw["num_hidden_layers"])]


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    unrotated = frozenset(block for block in range(common.num_layers) if not rotates(raw)[block])
    tied, theta = raw.get("tie_word_embeddings", True), rope({"rope_theta": 2e6} | raw)["rope_theta"]
    return replace(common, unrotated=unrotated, tied_embeddings=tied, rope_theta=theta)


def _problems(raw: Raw) -> list[str]:
    every, layers = raw.get("no_rope_layer_interval", 4), raw.get("num_hidden_layers")
    if type(every) is not int or every < 1:
        return [f"no_rope_layer_interval is {every!r} in config.json; it must be a positive whole number"]
    if isinstance(layers, int) and len(given := rotates(raw)) < layers:
        return [f"no_rope_layers has {len(given)} entries for num_hidden_layers={layers}"]
    return []


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    table=lambda hf: DENSE,
    read=_read,
    problems=_problems,
    keys=("no_rope_layers", "no_rope_layer_interval"),
    ignored=("sliding_window", "max_window_layers"),  # without `use_sliding_window`, which is refused
    example=Example(
        models="SmolLM3-3B",
        differs="blocks without rotation",
        cases={
            "smollm3": dict(pad_token_id=0),
            "smollm3 untied, own blocks": dict(
                pad_token_id=0, tie_word_embeddings=False, no_rope_layers=[0, 1, 1, 0], rms_norm_eps=1e-5
            ),
        },
        release=dict(
            model_type="smollm3",
            architectures=["SmolLM3ForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=128000,
            eos_token_id=128012,
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=11008,
            layer_types=[FULL] * 36,
            max_position_embeddings=65536,
            max_window_layers=28,
            mlp_bias=False,
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9,
            num_attention_heads=16,
            num_hidden_layers=36,
            num_key_value_heads=4,
            pad_token_id=128004,
            pretraining_tp=2,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=5000000.0,
            sliding_window=None,
            torch_dtype="bfloat16",
            transformers_version="4.54.0.dev0",
            use_cache=False,
            use_sliding_window=False,
            vocab_size=128256,
        ),
    ),
)
