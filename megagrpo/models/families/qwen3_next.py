"""Qwen3-Next: Gated DeltaNet in three of four blocks, attention with an output gate in the others, and a mixture of
experts with a gated shared expert. Its layers for predicting several tokens are dropped."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import GatedDelta, HfConfig
from megagrpo.models.families.blocks import delta_rows, gated_qkv, same
from megagrpo.models.families.dense import ATTENTION, DENSE, LAYER, QK_NORM, experts, shared_expert
from megagrpo.models.families.family import (
    EXPERT_KEYS,
    FULL,
    LINEAR,
    REQUIRED,
    Family,
    Raw,
    Table,
    expert_problems,
    mixture,
)
from megagrpo.models.families.qwen3 import moe_blocks

_DELTA = LAYER + "linear_attn."
DELTA_KEYS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
# Gated attention and Gated DeltaNet, without the projections of the latter, which the families store differently
HYBRID: Table = DENSE | QK_NORM
HYBRID |= {
    "self_attention.linear_qkv.weight": gated_qkv(ATTENTION + "{p}_proj.weight"),
    "self_attention.in_proj.layer_norm_weight": same(LAYER + "input_layernorm.weight"),
    "self_attention.conv1d.weight": delta_rows(dict.fromkeys("qkv", _DELTA + "conv1d.weight")),
    "self_attention.A_log": same(_DELTA + "A_log"),
    "self_attention.dt_bias": same(_DELTA + "dt_bias"),
    "self_attention.out_norm.weight": same(_DELTA + "norm.weight"),
    "self_attention.out_proj.weight": same(_DELTA + "out_proj.weight"),
}
_PROJECTIONS = dict.fromkeys("qkvz", _DELTA + "in_proj_qkvz.weight") | dict.fromkeys("ba", _DELTA + "in_proj_ba.weight")
_TABLE = HYBRID | experts("mlp", "gate_proj", "up_proj", "down_proj") | shared_expert("shared_expert")
_TABLE |= {"self_attention.in_proj.weight": delta_rows(_PROJECTIONS, by_key_head=True)}


def gated_delta(raw: Raw) -> GatedDelta:
    """Return the recurrent part: its blocks are those of `layer_types`, or all but each `full_attention_interval`th."""
    every, blocks = raw.get("full_attention_interval") or 4, range(raw["num_hidden_layers"])
    types = raw.get("layer_types") or [LINEAR if (block + 1) % every else FULL for block in blocks]
    recurrent = frozenset(block for block in blocks if types[block] == LINEAR)
    return GatedDelta(*(raw[key] for key in DELTA_KEYS), blocks=recurrent)


def hybrid(raw: Raw, common: HfConfig) -> HfConfig:
    """Return the architecture with what Qwen3-Next and Qwen3.5 have in common."""
    delta = gated_delta(raw)
    return replace(
        common, qk_norm=True, attention_gate=True, centred_norms=True, gated_delta=delta if delta.blocks else None
    )


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    fields = dict(normalized=raw.get("norm_topk_prob", True), blocks=moe_blocks(raw), shared_gate=True)
    fields |= dict(intermediate_size=raw["moe_intermediate_size"], shared_size=raw["shared_expert_intermediate_size"])
    return replace(hybrid(raw, common), experts=mixture(raw, **fields))


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=lambda raw: expert_problems(raw, ("moe_intermediate_size",), ("shared_expert_intermediate_size",)),
    required=(*REQUIRED, *DELTA_KEYS, "num_key_value_heads", "head_dim"),
    keys=(
        *(*EXPERT_KEYS, *DELTA_KEYS, "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
        *("mlp_only_layers", "decoder_sparse_step", "layer_types", "full_attention_interval"),
    ),
    dropped=lambda hf: (r"mtp\..+",),
    rope_types=("default", "yarn"),
    partial_rotary_factor=0.25,
    layer_types=(FULL, LINEAR),
)
