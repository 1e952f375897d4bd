"""Qwen3-Next: Gated DeltaNet in three of four blocks, attention with an output gate in the others, and a mixture of
experts with a gated shared expert. Its layers for predicting several tokens are not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import part_rows
from megagrpo.models.families.dense import GATE_UP_DOWN, SHARED_GATE, experts, shared_experts
from megagrpo.models.families.family import (
    EXPERT_KEYS,
    FULL,
    LINEAR,
    REQUIRED,
    Family,
    Raw,
    expert_problems,
    mixture,
)
from megagrpo.models.families.hybrid import DELTA, DELTA_KEYS, HYBRID, hybrid
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS, moe_blocks

_PROJECTIONS = dict.fromkeys("qkvz", DELTA + "in_proj_qkvz.weight") | dict.fromkeys("ba", DELTA + "in_proj_ba.weight")
_TABLE = HYBRID | experts("mlp", *GATE_UP_DOWN) | shared_experts("shared_expert") | SHARED_GATE
_TABLE |= {"self_attention.in_proj.weight": part_rows(_PROJECTIONS, by_key_head=True)}


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
    fixed=HAS_HEAD_NORMS | {"tie_word_embeddings": (False, "vLLM's model has an untied LM head")},
    untrained=lambda hf: (r"mtp\..+",),
    rope_types=("default", "yarn"),
    partial_rotary_factor=0.25,
    layer_types=(FULL, LINEAR),
)
