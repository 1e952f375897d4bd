"""Granite 3 and 4, and HyperCLOVA X: four scales, of the embedding, the attention scores, the residual branches and the
logits."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import DENSE, LAYER
from megagrpo.families.parts.mamba import FLOAT32_STATES, mamba2, mamba_problems, mamba_rows
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import gated, same, stacked
from megagrpo.families.shared.family import (
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

SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def scaled(raw: Raw, common: HfConfig) -> HfConfig:
    """Return the architecture with the scales of config.json; an absent scale is 1, that of the scores too."""
    embedding, attention, residual, logits = (raw.get(key, 1.0) for key in SCALES)
    return replace(
        common, embedding_scale=embedding, softmax_scale=attention, residual_scale=residual, logit_scale=1 / logits
    )


def scale_problems(raw: Raw) -> list[str]:
    """Return scales with invalid values."""
    scales = {key: raw[key] for key in SCALES if key in raw}
    wrong = {key: value for key, value in scales.items() if not isinstance(value, (int, float)) or value <= 0}
    return [f"{key} is {value!r} in config.json; it must be a number above 0" for key, value in wrong.items()]


GRANITE = Family(
    "granite", "GraniteForCausalLM", table=lambda hf: DENSE, read=scaled, problems=scale_problems, keys=SCALES
)

# HyperCLOVA X: a Granite with norms on the outputs of attention and MLP too, whose factor on the logits is not a
# divisor.
_POST_NORMS: Table = {
    "self_attention.post_norm.weight": same(LAYER + "post_norm1.weight"),
    "mlp.post_norm.weight": same(LAYER + "post_norm2.weight"),
}


def _hyperclovax_read(raw: Raw, common: HfConfig) -> HfConfig:
    attention = raw.get("attention_multiplier")
    return replace(
        scaled(raw, common),
        softmax_scale=common.head_dim**-0.5 if attention is None else attention,
        logit_scale=raw.get("logits_scaling", 1.0),
        post_norms=raw.get("use_post_norm", True),
    )


def _hyperclovax_problems(raw: Raw) -> list[str]:
    return scale_problems({key: value for key, value in raw.items() if (key, value) != ("attention_multiplier", None)})


HYPERCLOVAX = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    table=lambda hf: DENSE | (_POST_NORMS if hf.post_norms else {}),
    read=_hyperclovax_read,
    problems=_hyperclovax_problems,
    keys=(*SCALES, "use_post_norm"),
)

# Granite 3 with experts: a Granite with a mixture of experts in every block. Files hold the experts of a block as one
# tensor per projection, gate rows above up rows. The weights of a token's experts sum to 1.
_MIXTURE = LAYER + "block_sparse_moe."
_MOE_IN, _MOE_OUT = _MIXTURE + "input_linear.weight", _MIXTURE + "output_linear.weight"
GRANITE_EXPERTS: Table = {
    "mlp.router.weight": same(_MIXTURE + "router.layer.weight"),
    "mlp.experts.linear_fc1.weight": stacked(gated(_MOE_IN, _MOE_IN)),
    "mlp.experts.linear_fc2.weight": stacked(same(_MOE_OUT)),
}
_MOE_TABLE = {key: rule for key, rule in DENSE.items() if not key.startswith("mlp.")} | GRANITE_EXPERTS


GRANITEMOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    table=lambda hf: _MOE_TABLE,
    read=lambda raw, common: replace(scaled(raw, common), experts=mixture(raw), mixture_module="block_sparse_moe."),
    problems=lambda raw: expert_problems(raw) + scale_problems(raw),
    keys=(*EXPERT_KEYS, *SCALES),
)

# Granite 4: a Granite whose MLP is named as the shared one of models with experts, and with Mamba-2 in place of
# attention in most blocks of the models with -h- in their name.
_SHARED_IN, _SHARED_OUT = LAYER + "shared_mlp.input_linear.weight", LAYER + "shared_mlp.output_linear.weight"
_SHARED_MLP = {"linear_fc1.weight": gated(_SHARED_IN, _SHARED_IN), "linear_fc2.weight": same(_SHARED_OUT)}
_HYBRID_TABLE = DENSE | {f"mlp.{key}": rule for key, rule in _SHARED_MLP.items()}
_HYBRID_EXPERTS = GRANITE_EXPERTS | {f"mlp.shared_experts.{key}": rule for key, rule in _SHARED_MLP.items()}
_ATTENTION, _MAMBA = (FULL, "attention"), (LINEAR, "mamba")  # each with its name in older files
_MAMBA_SIZES = tuple(f"mamba_{key}" for key in ("n_heads", "d_head", "n_groups", "d_state", "d_conv"))
_MAMBA_OTHER = ("mamba_expand", "mamba_conv_bias", "time_step_limit")


def _hybrid_table(hf: HfConfig) -> Table:
    return _HYBRID_TABLE | (_HYBRID_EXPERTS if hf.experts else {}) | mamba_rows(hf, "mamba.", "input_layernorm.weight")


def _hybrid_read(raw: Raw, common: HfConfig) -> HfConfig:
    blocks = frozenset(range(common.num_layers))
    recurrent = frozenset(block for block in blocks if raw["layer_types"][block] in _MAMBA)
    bias = bool(raw.get("mamba_conv_bias", True))
    shared = raw["shared_intermediate_size"]
    return replace(
        scaled(raw, common),
        intermediate_size=shared,
        experts=mixture(raw, shared_size=shared) if raw["num_local_experts"] else None,
        mixture_module="block_sparse_moe.",
        unrotated=frozenset() if raw.get("position_embedding_type") == "rope" else blocks,
        recurrence=mamba2(raw, _MAMBA_SIZES, recurrent, bias) if recurrent else None,
    )


def _hybrid_problems(raw: Raw) -> list[str]:
    problems, types = scale_problems(raw), raw.get("layer_types") or ()
    problems += expert_problems(raw) if raw.get("num_local_experts") else []
    if any(kind in _MAMBA for kind in types):
        problems += mamba_problems(raw, (*_MAMBA_SIZES, "mamba_expand")) or _mamba_problems(raw)
    if raw.get("position_embedding_type") not in (None, "rope", "nope"):
        problems.append(f"position_embedding_type={raw['position_embedding_type']} is neither rope nor nope")
    return problems


def _mamba_problems(raw: Raw) -> list[str]:
    problems, (heads, width, groups, *_) = [], (raw[key] for key in _MAMBA_SIZES)
    if groups > 1:
        said = f"mamba_n_groups={groups}: transformers normalises over all groups together, vLLM over each alone"
        problems.append(f"{said}; only 1 is supported")
    if heads * width != (inner := raw["mamba_expand"] * raw.get("hidden_size", 0)):
        problems.append(f"mamba_n_heads x mamba_d_head = {heads * width} is not mamba_expand x hidden_size = {inner}")
    return problems


GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    table=_hybrid_table,
    read=_hybrid_read,
    problems=_hybrid_problems,
    required=(*REQUIRED, "num_local_experts", "shared_intermediate_size", "layer_types"),
    keys=(
        *(*EXPERT_KEYS, *SCALES, *_MAMBA_SIZES, *_MAMBA_OTHER),
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
