"""Qwen3-Next: Gated DeltaNet in three of four blocks, attention with an output gate in the others, and a mixture of
experts with a gated shared expert. Its layers for predicting several tokens are not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import part_rows
from megagrpo.models.families.dense import GATE_UP_DOWN, SHARED_GATE, experts, shared_experts
from megagrpo.models.families.example import TINY_EXPERTS, Example
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
from megagrpo.models.families.hybrid import DELTA, DELTA_KEYS, HYBRID, SERVED_DELTA, hybrid
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
    example=Example(
        models="Qwen3-Next-80B-A3B",
        differs="Gated DeltaNet in three of four blocks, a gate on attention, experts, a shared one with a gate",
        cases={
            "qwen3_next": TINY_EXPERTS
            | dict(norm_topk_prob=True, shared_expert_intermediate_size=24, layer_types=[LINEAR, FULL] * 2)
            | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20)
            | dict(rms_norm_eps=1e-2),  # the norm of a recurrent output near 0 amplifies rounding
            "qwen3_next, a dense block, as many key as value heads": TINY_EXPERTS
            | dict(norm_topk_prob=False, shared_expert_intermediate_size=40, layer_types=[FULL, LINEAR, LINEAR, LINEAR])
            | dict(linear_num_key_heads=6, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=8)
            | dict(mlp_only_layers=[1], linear_conv_kernel_dim=3, rms_norm_eps=1e-2),
        },
        release=dict(
            model_type="qwen3_next",
            architectures=["Qwen3NextForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=151643,
            decoder_sparse_step=1,
            dtype="bfloat16",
            eos_token_id=151645,
            full_attention_interval=4,
            head_dim=256,
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=5120,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
            max_position_embeddings=262144,
            mlp_only_layers=[],
            moe_intermediate_size=512,
            norm_topk_prob=True,
            num_attention_heads=16,
            num_experts=512,
            num_experts_per_tok=10,
            num_hidden_layers=48,
            num_key_value_heads=2,
            output_router_logits=False,
            partial_rotary_factor=0.25,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=10000000,
            router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=512,
            tie_word_embeddings=False,
            use_cache=True,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        served=SERVED_DELTA,
        served_dtype="bfloat16",
    ),
)
