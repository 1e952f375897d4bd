"""What the Gemma families share: norms around attention and MLP, scales, and caps. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import DENSE, LAYER
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import Raw, Table

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
