"""Gemma 2: norms around attention and MLP, capped scores and logits, and a window in every other block. Gemma 3, the
text model: head norms in place of caps, and separate rotary angles in blocks with a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, LAYER, QK_NORM
from megagrpo.models.families.family import SLIDING, Family, Raw, Table, rope, windows
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

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


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    table=lambda hf: SANDWICH,
    read=_gemma2,
    problems=cap_problems,
    keys=GEMMA_KEYS,
    ignored=GEMMA_IGNORED,
    fixed=GEMMA_FIXED,
)


_SCORE_CAP = "attn_logit_softcapping"


def _local_rope(raw: Raw) -> dict[str, Any]:
    """Return the rotary parameters of the blocks with a window."""
    old = {"rope_theta": raw.get("rope_local_base_freq", 10000.0)}
    return old | ((raw.get("rope_parameters") or {}).get(SLIDING) or {})


def _gemma3(raw: Raw, common: HfConfig) -> HfConfig:
    every = raw.get("sliding_window_pattern", 6)
    return replace(
        gemma_config(raw, common),
        qk_norm=True,
        windows=windows(raw, raw.get("sliding_window", 4096), lambda block: (block + 1) % every != 0),
        rope_theta=rope({"rope_theta": 1e6} | raw)["rope_theta"],
        local_rope_theta=_local_rope(raw)["rope_theta"],
        logit_cap=raw.get("final_logit_softcapping"),
    )


def _gemma3_problems(raw: Raw) -> list[str]:
    kind = _local_rope(raw).get("rope_type", "default")
    wrong = [] if kind == "default" else [f"rope_type {kind!r} in blocks with a window is not supported"]
    return wrong + cap_problems(raw)


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    table=lambda hf: SANDWICH | QK_NORM,
    read=_gemma3,
    problems=_gemma3_problems,
    keys=(*(key for key in GEMMA_KEYS if key != _SCORE_CAP), "sliding_window_pattern", "rope_local_base_freq"),
    # transformers writes it beside the layer_types that it derived from it
    ignored=(*GEMMA_IGNORED, "_sliding_window_pattern"),
    fixed=GEMMA_FIXED | HAS_HEAD_NORMS | {_SCORE_CAP: (None, "transformers and vLLM do not apply it here; remove it")},
)
