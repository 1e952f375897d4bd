"""Shared code of Qwen3-Next and Qwen3.5: Gated DeltaNet in most blocks, attention with an output gate in the others.
Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import ATTENTION, DENSE, LAYER, QK_NORM
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import gated_qkv, part_rows, same
from megagrpo.families.shared.family import FULL, LINEAR, Raw, Table
from megagrpo.families.shared.recurrence import GatedDelta

DELTA = LAYER + "linear_attn."
DELTA_KEYS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
# Gated attention and Gated DeltaNet, without the projections of the latter, which the families store differently
HYBRID: Table = DENSE | QK_NORM
HYBRID |= {
    "self_attention.linear_qkv.weight": gated_qkv(ATTENTION + "{p}_proj.weight"),
    "self_attention.in_proj.layer_norm_weight": same(LAYER + "input_layernorm.weight"),
    "self_attention.conv1d.weight": part_rows(dict.fromkeys("qkv", DELTA + "conv1d.weight")),
    "self_attention.A_log": same(DELTA + "A_log"),
    "self_attention.dt_bias": same(DELTA + "dt_bias"),
    "self_attention.out_norm.weight": same(DELTA + "norm.weight"),
    "self_attention.out_proj.weight": same(DELTA + "out_proj.weight"),
}


def gated_delta(raw: Raw) -> GatedDelta:
    """Return the recurrent part: its blocks are those of `layer_types`, or all but each `full_attention_interval`th."""
    every, blocks = raw.get("full_attention_interval") or 4, range(raw["num_hidden_layers"])
    types = raw.get("layer_types") or [LINEAR if (block + 1) % every else FULL for block in blocks]
    recurrent = frozenset(block for block in blocks if types[block] == LINEAR)
    key_heads, value_heads, key_dim, value_dim, kernel = (raw[key] for key in DELTA_KEYS)
    return GatedDelta(key_heads, value_heads, key_dim, value_dim, kernel, recurrent)


def delta_problems(raw: Raw) -> list[str]:
    """Return what is wrong with the sizes of Gated DeltaNet, if they are sizes."""
    keys, values = (raw.get(key, 0) for key in DELTA_KEYS[:2])
    if not all(type(size) is int and size > 0 for size in (keys, values)) or values % keys == 0:
        return []
    return [f"linear_num_value_heads={values} is not divisible by linear_num_key_heads={keys}"]


def hybrid(raw: Raw, common: HfConfig) -> HfConfig:
    """Return the architecture with what Qwen3-Next and Qwen3.5 have in common."""
    delta = gated_delta(raw)
    return replace(
        common, qk_norm=True, attention_gate=True, centred_norms=True, recurrence=delta if delta.blocks else None
    )
