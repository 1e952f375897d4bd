"""Gemma 2 and 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.families.own.gemma.gemma_parts import (
    GEMMA_FIXED,
    GEMMA_IGNORED,
    GEMMA_KEYS,
    SANDWICH,
    cap_problems,
    gemma_config,
)
from megagrpo.families.parts.llama_table import HAS_HEAD_NORMS, QK_NORM
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.family import SLIDING, Family, Raw, rope, windows
from megagrpo.families.shared.vision import square_vision
from megagrpo.families.shared.wrapper import Wrapper


# Gemma 2: norms around attention and MLP, capped scores and logits, and a window in every other block.
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

# Gemma 3, alone and inside its multimodal model: Gemma 2 with head norms in place of caps, and separate rotary angles
# in blocks with a window.
_SCORE_CAP = "attn_logit_softcapping"

# Keys that the text_config of the published multimodal models may leave out.
_DEFAULTS: Raw = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262208)


def _local_rope(raw: Raw) -> dict[str, Any]:
    """Return the rotary parameters of the blocks with a window."""
    old = {"rope_theta": raw.get("rope_local_base_freq", 10000.0)}
    return old | ((raw.get("rope_parameters") or {}).get(SLIDING) or {})


def _gemma3_read(raw: Raw, common: HfConfig) -> HfConfig:
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
    read=_gemma3_read,
    problems=_gemma3_problems,
    keys=(*(key for key in GEMMA_KEYS if key != _SCORE_CAP), "sliding_window_pattern", "rope_local_base_freq"),
    # transformers writes it beside the layer_types that it derived from it
    ignored=(*GEMMA_IGNORED, "_sliding_window_pattern"),
    fixed=GEMMA_FIXED | HAS_HEAD_NORMS | {_SCORE_CAP: (None, "transformers and vLLM do not apply it here; remove it")},
    local_rope=True,
    wrappers=(
        Wrapper(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            defaults=_DEFAULTS,
            vision=square_vision("Gemma3MultiModalProjector"),
        ),
    ),
)
