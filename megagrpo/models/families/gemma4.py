"""Gemma 4, the text model: Gemma 3 with wider heads in blocks without a window, whose keys may be their values, and a
factor on the output of each block. 26B-A4B has experts beside the MLPs; E2B and E4B have inputs per layer, and last
blocks that borrow keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import LAYER, QK_NORM
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import FULL, REQUIRED, SLIDING, Family, Raw, Table, rope, windows
from megagrpo.models.families.gemma2 import GEMMA_FIXED, SANDWICH, cap_problems, gemma_config
from megagrpo.models.families.gemma4_heads import HEAD_KEYS, KEYS_AS_VALUES, global_heads, head_problems
from megagrpo.models.families.gemma4_mixture import (
    MIXTURE,
    MIXTURE_KEYS,
    RELEASE_MIXTURE,
    TINY_MIXTURE,
    beside_mlp,
    mixture_problems,
)
from megagrpo.models.families.gemma4_small import (
    BORROWED,
    E2B,
    E4B,
    LAYER_INPUTS,
    SMALL_KEYS,
    TINY_SMALL,
    small_fields,
    small_problems,
    unread,
)
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.wrapper import Wrapper

_TABLE: Table = SANDWICH | QK_NORM | {"block_scale": same(LAYER + "layer_scalar")}


def _table(hf: HfConfig) -> Table:
    shared = KEYS_AS_VALUES if hf.global_heads and hf.global_heads.keys_as_values else {}
    inputs = LAYER_INPUTS if hf.layer_inputs else {}
    return _TABLE | shared | inputs | (BORROWED if hf.borrowers else {}) | (MIXTURE if hf.experts else {})


def _local_rope(raw: Raw) -> dict[str, Any]:
    return {"rope_theta": 10000.0} | ((raw.get("rope_parameters") or {}).get(SLIDING) or {})


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(
        gemma_config(raw, common),
        softmax_scale=1.0,
        centred_norms=False,
        qk_norm=True,
        unit_value_norm=True,
        block_scales=True,
        global_heads=global_heads(raw, common),
        windows=windows(raw, raw["sliding_window"], lambda block: False),
        partial_rotary_factor=1.0,  # the angles of the other dimensions are 0
        rope_theta=rope({"rope_theta": 1e6} | raw)["rope_theta"],
        local_rope_theta=_local_rope(raw)["rope_theta"],
        logit_cap=raw.get("final_logit_softcapping"),
        experts=beside_mlp(raw),
        mixture_module="",
        **small_fields(raw),
    )


def _problems(raw: Raw) -> list[str]:
    problems, local, types = cap_problems(raw), _local_rope(raw), raw.get("layer_types") or []
    if local.get("rope_type", "default") != "default" or local.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"{SLIDING} in rope_parameters is {local}; only unscaled angles of whole heads are supported")
    if SLIDING not in types or types[-1] != FULL:
        problems.append(f"layer_types must name {SLIDING} and end with {FULL}")
    else:
        problems += head_problems(raw)
    if raw.get("use_bidirectional_attention") not in (None, "vision"):
        problems.append("use_bidirectional_attention: only causal attention of texts is supported")
    return problems + mixture_problems(raw) + small_problems(raw)


_TINY: Raw = dict(head_dim=24, per_layer_config={block: dict(head_dim=32) for block in "13"}, pad_token_id=0)
_TINY |= dict(sliding_window=7, layer_types=[SLIDING, FULL] * 2, hidden_size_per_layer_input=0)
_TINY_TOWER: Raw = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
_TINY_TOWER |= dict(num_key_value_heads=4, head_dim=8, position_embedding_size=16)
_TOKENS = {f"{kind}_token_id": 126 for kind in ("image", "video", "audio", "boi", "eoi", "boa")}
_RELEASE: Raw = dict(model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], attention_bias=False)
_RELEASE |= dict(attention_dropout=0.0, attention_k_eq_v=True, dtype="bfloat16")
_RELEASE |= dict(enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=512)
_RELEASE |= dict(head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=5376, hidden_size_per_layer_input=0)
_RELEASE |= dict(layer_types=([SLIDING] * 5 + [FULL]) * 10, max_position_embeddings=262144, vocab_size=262144)
_RELEASE |= dict(intermediate_size=21504, num_attention_heads=32, num_global_key_value_heads=4, num_hidden_layers=60)
_RELEASE |= dict(num_key_value_heads=16, num_kv_shared_layers=0, rms_norm_eps=1e-06)
_ROPE: Raw = dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional")
_RELEASE |= dict(rope_parameters={FULL: _ROPE, SLIDING: dict(rope_theta=10000.0, rope_type="default")})
_RELEASE |= dict(sliding_window=1024, tie_word_embeddings=True, use_bidirectional_attention="vision")
FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    table=_table,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "sliding_window", "layer_types"),
    keys=(
        *("final_logit_softcapping", "sliding_window", "layer_types", "use_bidirectional_attention"),
        *(*HEAD_KEYS, *MIXTURE_KEYS, *SMALL_KEYS),
    ),
    fixed=GEMMA_FIXED | HAS_HEAD_NORMS,
    untrained=lambda hf: unread(hf.borrowers, hf.num_layers),
    rope_types=("proportional",),
    local_rope=True,
    partial_rotary_factor=1.0,
    merged_only=("k_proj",),  # vLLM has no adapter for the values that are keys
    wrappers=(Wrapper("gemma4", "Gemma4ForConditionalGeneration", prefix="model.language_model."),),
    example=Example(
        models="Gemma 4 31B, 26B-A4B, E2B and E4B, their text models",
        differs="as `gemma3_text`, with other heads in blocks without a window, norms of values, a factor per block; "
        "experts beside an MLP, or inputs per layer and borrowed keys",
        cases={
            "gemma4": _TINY | dict(final_logit_softcapping=2.0),
            "gemma4 keys as values": _TINY
            | dict(attention_k_eq_v=True, tie_word_embeddings=False)
            | dict(per_layer_config={block: dict(head_dim=32, num_key_value_heads=6) for block in "13"}),
            "gemma4 experts": _TINY | TINY_MIXTURE,
            "gemma4 small": _TINY | TINY_SMALL | dict(num_key_value_heads=1),
        },
        wrapped={"gemma4": dict(vision_config=_TINY_TOWER, text_config=TINY_SMALL, **_TOKENS)},
        drift=1e-6,  # vLLM's last bits differ between runs, in models that borrow keys
        release=_RELEASE,
        others={"Gemma 4 26B-A4B": RELEASE_MIXTURE, "Gemma 4 E2B": E2B, "Gemma 4 E4B": E4B},
        tolerance=5e-5,  # scores are not scaled, so rounding counts more
    ),
)
