"""Granite 3 with experts: a Granite with a mixture of experts in every block. Files hold the experts of a block as one
tensor per projection, gate rows above up rows. The weights of a token's experts sum to 1."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import gated, same, stacked
from megagrpo.models.families.dense import DENSE, LAYER
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import EXPERT_KEYS, Family, Raw, Table, expert_problems, mixture
from megagrpo.models.families.granite import SCALES, TINY_SCALES, scale_problems, scaled

_MOE = LAYER + "block_sparse_moe."
_IN, _OUT = _MOE + "input_linear.weight", _MOE + "output_linear.weight"
GRANITE_EXPERTS: Table = {
    "mlp.router.weight": same(_MOE + "router.layer.weight"),
    "mlp.experts.linear_fc1.weight": stacked(gated(_IN, _IN)),
    "mlp.experts.linear_fc2.weight": stacked(same(_OUT)),
}
_TABLE = {key: rule for key, rule in DENSE.items() if not key.startswith("mlp.")} | GRANITE_EXPERTS


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(scaled(raw, common), experts=mixture(raw), mixture_module="block_sparse_moe.")


FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=lambda raw: expert_problems(raw) + scale_problems(raw),
    keys=(*EXPERT_KEYS, *SCALES),
    example=Example(
        models="Granite 3.0 and 3.1, 1B-A400M and 3B-A800M",
        differs="as `granite`, with experts",
        cases={
            "granitemoe": TINY_SCALES | dict(num_local_experts=8, num_experts_per_tok=3),
            "granitemoe tied, llama3 rope": TINY_SCALES
            | dict(num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
        },
        served=dict(intermediate_size=96),
        release=dict(
            model_type="granitemoe",
            architectures=["GraniteMoeForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            attention_multiplier=0.015625,
            bos_token_id=0,
            embedding_multiplier=12.0,
            eos_token_id=0,
            hidden_act="silu",
            hidden_size=1536,
            initializer_range=0.02,
            intermediate_size=512,
            logits_scaling=6.0,
            max_position_embeddings=131072,
            num_attention_heads=24,
            num_experts_per_tok=8,
            num_hidden_layers=32,
            num_key_value_heads=8,
            num_local_experts=40,
            output_router_logits=False,
            pad_token_id=0,
            residual_multiplier=0.22,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=10000000.0,
            router_aux_loss_coef=0.0,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            transformers_version="4.46.0.dev0",
            use_cache=True,
            vocab_size=49155,
        ),
    ),
)
