"""Granite 4: a Granite whose MLP is named as the shared one of models with experts, and with Mamba-2 in place of
attention in most blocks of the models with -h- in their name."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import gated, same
from megagrpo.models.families.dense import DENSE, LAYER
from megagrpo.models.families.example import LLAMA3_ROPE, Example
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
from megagrpo.models.families.granite import SCALES, TINY_SCALES, scale_problems, scaled
from megagrpo.models.families.granitemoe import GRANITE_EXPERTS
from megagrpo.models.families.mamba import FLOAT32_STATES, mamba2, mamba_problems, mamba_rows

_IN, _OUT = LAYER + "shared_mlp.input_linear.weight", LAYER + "shared_mlp.output_linear.weight"
_MLP = {"linear_fc1.weight": gated(_IN, _IN), "linear_fc2.weight": same(_OUT)}
_TABLE = DENSE | {f"mlp.{key}": rule for key, rule in _MLP.items()}
_EXPERTS = GRANITE_EXPERTS | {f"mlp.shared_experts.{key}": rule for key, rule in _MLP.items()}
_ATTENTION, _MAMBA = (FULL, "attention"), (LINEAR, "mamba")  # each with its name in older files
_SIZES = tuple(f"mamba_{key}" for key in ("n_heads", "d_head", "n_groups", "d_state", "d_conv"))
_OTHER = ("mamba_expand", "mamba_conv_bias", "time_step_limit")


def _table(hf: HfConfig) -> Table:
    return _TABLE | (_EXPERTS if hf.experts else {}) | mamba_rows(hf, "mamba.", "input_layernorm.weight")


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    blocks = frozenset(range(common.num_layers))
    recurrent = frozenset(block for block in blocks if raw["layer_types"][block] in _MAMBA)
    bias = raw.get("mamba_conv_bias", True)
    shared = raw["shared_intermediate_size"]
    return replace(
        scaled(raw, common),
        intermediate_size=shared,
        experts=mixture(raw, shared_size=shared) if raw["num_local_experts"] else None,
        mixture_module="block_sparse_moe.",
        unrotated=frozenset() if raw.get("position_embedding_type") == "rope" else blocks,
        recurrence=mamba2(raw, _SIZES, recurrent, bias) if recurrent else None,
    )


def _problems(raw: Raw) -> list[str]:
    problems, types = scale_problems(raw), raw.get("layer_types") or ()
    problems += expert_problems(raw) if raw.get("num_local_experts") else []
    if any(kind in _MAMBA for kind in types):
        problems += mamba_problems(raw, (*_SIZES, "mamba_expand")) or _mamba_problems(raw)
    if raw.get("position_embedding_type") not in (None, "rope", "nope"):
        problems.append(f"position_embedding_type={raw['position_embedding_type']} is neither rope nor nope")
    return problems


def _mamba_problems(raw: Raw) -> list[str]:
    problems, (heads, width, groups, *_) = [], (raw[key] for key in _SIZES)
    if groups > 1:
        said = f"mamba_n_groups={groups}: transformers normalises over all groups together, vLLM over each alone"
        problems.append(f"{said}; only 1 is supported")
    if heads * width != (inner := raw["mamba_expand"] * raw.get("hidden_size", 0)):
        problems.append(f"mamba_n_heads x mamba_d_head = {heads * width} is not mamba_expand x hidden_size = {inner}")
    return problems


_TINY: Raw = TINY_SCALES | dict(layer_types=[FULL] * 4, num_local_experts=0, shared_intermediate_size=80)
_TINY |= dict(mamba_n_heads=6, position_embedding_type="rope")
_TINY_MAMBA: Raw = _TINY | dict(layer_types=[LINEAR, FULL] * 2, mamba_n_heads=8, mamba_d_head=24, mamba_d_state=10)
_TINY_MAMBA |= dict(position_embedding_type="nope", tie_word_embeddings=True, rms_norm_eps=1e-2)
_RELEASE: Raw = dict(model_type="granitemoehybrid", architectures=["GraniteMoeHybridForCausalLM"], hidden_act="silu")
_RELEASE |= dict(layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)], num_hidden_layers=40)
_RELEASE |= dict(hidden_size=2048, intermediate_size=8192, shared_intermediate_size=8192, vocab_size=100352)
_RELEASE |= dict(num_attention_heads=32, num_key_value_heads=8, attention_bias=False, attention_dropout=0.0)
_RELEASE |= dict(embedding_multiplier=12, attention_multiplier=0.015625, residual_multiplier=0.22, logits_scaling=8)
_RELEASE |= dict(mamba_n_heads=64, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2)
_RELEASE |= dict(mamba_chunk_size=256, mamba_conv_bias=True, mamba_proj_bias=False, init_method="mup")
_RELEASE |= dict(num_local_experts=0, num_experts_per_tok=0, output_router_logits=False, router_aux_loss_coef=0.01)
_RELEASE |= dict(rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000, position_embedding_type="nope")
_RELEASE |= dict(max_position_embeddings=131072, initializer_range=0.1, normalization_function="rmsnorm")
_RELEASE |= dict(tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.56.0", use_cache=True)
FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    table=_table,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "num_local_experts", "shared_intermediate_size", "layer_types"),
    keys=(
        *(*EXPERT_KEYS, *SCALES, *_SIZES, *_OTHER),
        *("shared_intermediate_size", "position_embedding_type", "layer_types"),
    ),
    ignored=("mamba_chunk_size", "init_method"),
    fixed={
        "normalization_function": ("rmsnorm", "only rmsnorm is supported"),
        "mamba_proj_bias": (False, "biases on the projections of Mamba-2 are not supported"),
    },
    layer_types=(*_ATTENTION, *_MAMBA),
    names={"shared_intermediate_size": "intermediate_size"},
    served_flags=lambda hf: FLOAT32_STATES if hf.recurrence else {},
    merged_only=("input_linear",),  # gate and up projection, for which vLLM expects two adapters
    example=Example(
        models="Granite 4.0: Micro, 1B, 350M, H-Small, H-Tiny, H-Micro, H-1B, H-350M",
        differs="as `granite`, rotation optional; H: Mamba-2 in nine of ten blocks, experts in some models",
        cases={
            "granitemoehybrid": _TINY_MAMBA,
            "granitemoehybrid, no bias of the convolution": _TINY_MAMBA
            | dict(mamba_conv_bias=False, mamba_d_conv=3, position_embedding_type="rope", tie_word_embeddings=False),
            "granitemoehybrid, experts": _TINY_MAMBA
            | dict(num_local_experts=8, num_experts_per_tok=3, intermediate_size=32, layer_types=[LINEAR, FULL] * 2),
            "granitemoehybrid, attention only": _TINY | dict(tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
        },
        drift=1e-5,  # vLLM's scan of Mamba-2 does not repeat the last bits
        served=dict(mamba_expand=1),  # with the hidden states of the tests' servers, twice as wide
        release=_RELEASE,
    ),
)
