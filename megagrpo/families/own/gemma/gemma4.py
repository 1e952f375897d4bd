"""Gemma 4, the text model: Gemma 3 with wider heads in blocks without a window, whose keys may be their values, and a
factor on the output of each block. 26B-A4B has experts beside the MLPs; E2B and E4B have inputs per layer, and last
blocks that borrow keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.families.own.gemma.gemma4_heads import HEAD_KEYS, KEYS_AS_VALUES, global_heads, head_problems
from megagrpo.families.own.gemma.gemma4_mixture import MIXTURE, MIXTURE_KEYS, beside_mlp, mixture_problems
from megagrpo.families.own.gemma.gemma4_small import (
    BORROWED,
    LAYER_INPUTS,
    SMALL_KEYS,
    small_fields,
    small_problems,
    unread,
)
from megagrpo.families.own.gemma.gemma_parts import GEMMA_FIXED, SANDWICH, cap_problems, gemma_config
from megagrpo.families.parts.llama_table import HAS_HEAD_NORMS, LAYER, QK_NORM
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import FULL, REQUIRED, SLIDING, Family, Raw, Table, rope, windows
from megagrpo.families.shared.wrapper import Wrapper

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
)
