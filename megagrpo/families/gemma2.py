"""Gemma 2: norms around attention and MLP, capped scores and logits, and a window in every other block."""

from __future__ import annotations

from typing import Any

from megagrpo.families.blocks import same
from megagrpo.families.dense import DENSE, LAYER
from megagrpo.families.family import FIXED, Family, Raw, Table, windows

SANDWICH: Table = DENSE | {
    "self_attention.post_norm.weight": same(LAYER + "post_attention_layernorm.weight"),
    "pre_mlp_layernorm.weight": same(LAYER + "pre_feedforward_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": same(LAYER + "pre_feedforward_layernorm.weight"),
    "mlp.post_norm.weight": same(LAYER + "post_feedforward_layernorm.weight"),
}
# Older files name the exact function in `hidden_act`; the tanh approximation is meant all the same.
GEMMA_FIXED = {key: rule for key, rule in FIXED.items() if key != "hidden_act"} | {
    "hidden_activation": ("gelu_pytorch_tanh", "only gelu_pytorch_tanh is supported"),
    "use_bidirectional_attention": (False, "only causal attention is supported"),
}


def gemma_fields(raw: Raw) -> dict[str, Any]:
    """What the Gemma families have in common, beside the table. Config.json may leave out what is the default."""
    return dict(
        head_dim=raw.get("head_dim", 256),
        tied_embeddings=raw.get("tie_word_embeddings", True),
        softmax_scale=raw.get("query_pre_attn_scalar", 256) ** -0.5,
        activation="gelu",
        embedding_scale=raw["hidden_size"] ** 0.5,
        post_norms=True,
        centred_norms=True,
    )


def _read(raw: Raw) -> dict[str, Any]:
    return gemma_fields(raw) | dict(
        windows=windows(raw, raw.get("sliding_window", 4096), lambda block: block % 2 == 0),
        score_cap=raw.get("attn_logit_softcapping", 50.0),
        logit_cap=raw.get("final_logit_softcapping", 30.0),
    )


FAMILY = Family("gemma2", "Gemma2ForCausalLM", table=lambda hf: SANDWICH, read=_read, fixed=GEMMA_FIXED)
