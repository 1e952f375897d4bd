"""Granite 4: a Granite whose MLP is named as the shared one of models with experts, and with Mamba-2 in place of
attention in most blocks of the models with -h- in their name."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import gated, same
from megagrpo.models.families.dense import DENSE, LAYER
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
from megagrpo.models.families.granite import SCALES, scale_problems, scaled
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
)
