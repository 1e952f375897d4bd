"""Command R7B and Command A: a Command R whose blocks have a window, three of four if config.json names none. Blocks
without a window do not rotate."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.cohere import (
    COHERE_FIXED,
    COHERE_IGNORED,
    COHERE_KEYS,
    COHERE_REQUIRED,
    PARALLEL,
    TINY_COHERE,
    head_problems,
    parallel,
)
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import FULL, SLIDING, Family, Raw, windows


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    every = raw.get("sliding_window_pattern", 4)
    sizes = windows(raw, raw["sliding_window"], lambda block: (block + 1) % every != 0)
    unrotated = frozenset(block for block, size in enumerate(sizes) if size is None)
    return replace(parallel(raw, common, 1e4), windows=sizes, unrotated=unrotated)


def _problems(raw: Raw) -> list[str]:
    every = raw.get("sliding_window_pattern", 4)
    if type(every) is not int or every < 1:
        return [f"sliding_window_pattern is {every!r} in config.json; it must be a positive whole number"]
    return ([] if raw.get("sliding_window") else ["config.json lacks sliding_window"]) + head_problems(raw)


def _served_flags(hf: HfConfig) -> dict[str, Raw | str]:
    """Return the window with which vLLM lets a token see as many as transformers does: vLLM adds one."""
    size = next(filter(None, hf.windows), None)
    key = {} if size is None else {"sliding_window": size - 1}
    return {"--hf-overrides": key} if key else {}


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    table=lambda hf: PARALLEL,
    read=_read,
    problems=_problems,
    required=(*COHERE_REQUIRED, "sliding_window"),
    keys=(*COHERE_KEYS, "sliding_window", "sliding_window_pattern", "layer_types"),
    ignored=(*COHERE_IGNORED, "_sliding_window_pattern"),
    fixed=COHERE_FIXED,
    served_flags=_served_flags,
    example=Example(
        models="Command R7B, Command A",
        differs="as `cohere`, windows, and no rotation in blocks without one",
        cases={
            "cohere2": TINY_COHERE | dict(sliding_window=7),
            "cohere2 own blocks": TINY_COHERE | dict(sliding_window=5, layer_types=[FULL, SLIDING, SLIDING, FULL]),
        },
        release=dict(
            model_type="cohere2",
            architectures=["Cohere2ForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=5,
            cache_implementation="hybrid",
            eos_token_id=255001,
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=14336,
            layer_norm_eps=1e-05,
            layer_switch=4,
            logit_scale=0.25,
            max_position_embeddings=132096,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            order_of_interleaved_layers="local_attn_first",
            pad_token_id=0,
            position_embedding_type="rope_gptj",
            rope_scaling=None,
            rope_theta=50000,
            rotary_pct=1.0,
            sliding_window=4096,
            sliding_window_pattern=4,
            torch_dtype="bfloat16",
            transformers_version="4.48.0.dev0",
            use_cache=True,
            use_embedding_sharing=True,
            use_gated_activation=True,
            use_parallel_block=True,
            use_parallel_embedding=True,
            vocab_size=256000,
        ),
    ),
)
