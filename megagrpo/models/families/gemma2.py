"""Gemma 2: norms around attention and MLP, capped scores and logits, and a window in every other block."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, LAYER
from megagrpo.models.families.family import Family, Raw, Table, windows

SANDWICH: Table = DENSE | {
    "self_attention.post_norm.weight": same(LAYER + "post_attention_layernorm.weight"),
    "pre_mlp_layernorm.weight": same(LAYER + "pre_feedforward_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": same(LAYER + "pre_feedforward_layernorm.weight"),
    "mlp.post_norm.weight": same(LAYER + "post_feedforward_layernorm.weight"),
}
GEMMA_FIXED = {"hidden_activation": ("gelu_pytorch_tanh", "only gelu_pytorch_tanh is supported")}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
GEMMA_KEYS = ("query_pre_attn_scalar", "sliding_window", "layer_types", *CAPS)
# Older files name the exact gelu in `hidden_act`, but the models use the tanh approximation.
GEMMA_IGNORED = ("hidden_act", "sliding_window_size")


def gemma_config(raw: Raw, common: HfConfig) -> HfConfig:
    """Return what the Gemma families share. config.json may leave out default values."""
    return replace(
        common,
        head_dim=raw.get("head_dim") or 256,
        tied_embeddings=raw.get("tie_word_embeddings", True),
        softmax_scale=(raw.get("query_pre_attn_scalar") or 256) ** -0.5,
        activation="gelu",
        embedding_scale=raw["hidden_size"] ** 0.5,
        post_norms=True,
        centred_norms=True,
    )


def cap_problems(raw: Raw) -> list[str]:
    """Return caps of scores and logits with invalid values (0 or less)."""
    caps = {key: raw[key] for key in CAPS if isinstance(raw.get(key), (int, float))}
    return [f"{key} is {cap} in config.json; it must be above 0, or null" for key, cap in caps.items() if cap <= 0]


def _gemma2(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(
        gemma_config(raw, common),
        windows=windows(raw, raw.get("sliding_window", 4096), lambda block: block % 2 == 0),
        score_cap=raw.get("attn_logit_softcapping", 50.0),
        logit_cap=raw.get("final_logit_softcapping", 30.0),
    )


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    table=lambda hf: SANDWICH,
    read=_gemma2,
    problems=cap_problems,
    keys=GEMMA_KEYS,
    ignored=GEMMA_IGNORED,
    fixed=GEMMA_FIXED,
)
