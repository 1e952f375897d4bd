"""Families with Gated DeltaNet in most blocks."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import (
    ATTENTION,
    DENSE,
    GATED_SHARED_EXPERT,
    HAS_HEAD_NORMS,
    LAYER,
    QK_NORM,
    USUAL_EXPERTS,
)
from megagrpo.families.parts.qwen import moe_blocks
from megagrpo.families.parts.qwen_vl import qwen_vl
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import gated_qkv, part_rows, same
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


# Qwen3-Next: Gated DeltaNet in three of four blocks, attention with an output gate in the others, and a mixture of
# experts with a gated shared expert. Its layers for predicting several tokens are not trained.
_PROJECTIONS = dict.fromkeys("qkvz", DELTA + "in_proj_qkvz.weight") | dict.fromkeys("ba", DELTA + "in_proj_ba.weight")
_QWEN3_NEXT_TABLE = HYBRID | USUAL_EXPERTS | GATED_SHARED_EXPERT
_QWEN3_NEXT_TABLE |= {"self_attention.in_proj.weight": part_rows(_PROJECTIONS, by_key_head=True)}


def _qwen3_next_read(raw: Raw, common: HfConfig) -> HfConfig:
    fields = dict(normalized=raw.get("norm_topk_prob", True), blocks=moe_blocks(raw), shared_gate=True)
    fields |= dict(intermediate_size=raw["moe_intermediate_size"], shared_size=raw["shared_expert_intermediate_size"])
    return replace(hybrid(raw, common), experts=mixture(raw, **fields))


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    table=lambda hf: _QWEN3_NEXT_TABLE,
    read=_qwen3_next_read,
    problems=lambda raw: (
        delta_problems(raw) + expert_problems(raw, ("moe_intermediate_size",), ("shared_expert_intermediate_size",))
    ),
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

# Qwen3.5, dense, alone and inside its multimodal model: Qwen3-Next's blocks, with the projections of Gated DeltaNet
# in four tensors. The rotation by three positions is the usual one for text, whose three positions are equal. Layers
# for predicting several tokens are not trained.
_QWEN3_5_PROJECTIONS = {part: f"{DELTA}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a") for part in name}
_QWEN3_5_TABLE = HYBRID | {"self_attention.in_proj.weight": part_rows(_QWEN3_5_PROJECTIONS)}
_GATES = ("silu", "swish")  # two names of one function; vLLM reads the key, transformers has no other function


def _qwen3_5_problems(raw: Raw) -> list[str]:
    gate = raw.get("output_gate_type") or "silu"
    wrong = [] if gate in _GATES else [f"output_gate_type={gate!r} is not supported; supported: {', '.join(_GATES)}"]
    return wrong + delta_problems(raw)


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    table=lambda hf: _QWEN3_5_TABLE,
    read=hybrid,
    problems=_qwen3_5_problems,
    required=(*REQUIRED, *DELTA_KEYS, "num_key_value_heads", "head_dim"),
    keys=(*DELTA_KEYS, "layer_types", "full_attention_interval", "output_gate_type"),
    # the precision of vLLM's recurrent state, the dropped layers, and a key of models with experts
    ignored=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"),
    fixed=HAS_HEAD_NORMS
    | {
        "attn_output_gate": (True, "attention of this family has an output gate"),
        "layer_scale": (False, "scales of whole layers are not supported"),
    },
    untrained=lambda hf: (r"mtp\..+",),
    wrappers=(qwen_vl("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3_5VisionModel"),),
    rope_types=("default", "yarn"),
    rope_keys=("mrope_section", "mrope_interleaved"),
    partial_rotary_factor=0.25,
    layer_types=(FULL, LINEAR),
)

# Qwen3.5 with experts, alone and inside its multimodal model: a dense Qwen3.5 whose blocks have a mixture of experts
# and a shared expert with a gate.
_QWEN3_5_MOE_TABLE = _QWEN3_5_TABLE | USUAL_EXPERTS | GATED_SHARED_EXPERT
_QWEN3_5_MOE_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")


def _qwen3_5_moe_read(raw: Raw, common: HfConfig) -> HfConfig:
    width, shared = (raw[key] for key in _QWEN3_5_MOE_SIZES)
    routed = mixture(raw, intermediate_size=width, shared_size=shared, shared_gate=True)
    return replace(hybrid(raw, common), intermediate_size=width, experts=routed)  # no block has a dense MLP


_EVERY = "every block of this family has experts"

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    table=lambda hf: _QWEN3_5_MOE_TABLE,
    read=_qwen3_5_moe_read,
    problems=lambda raw: QWEN3_5.problems(raw) + expert_problems(raw, *((key,) for key in _QWEN3_5_MOE_SIZES)),
    required=tuple(key for key in QWEN3_5.required if key != "intermediate_size"),
    keys=(*QWEN3_5.keys, *EXPERT_KEYS, *_QWEN3_5_MOE_SIZES),
    fixed=QWEN3_5.fixed
    | {
        "mlp_only_layers": ([], _EVERY),
        "decoder_sparse_step": (1, _EVERY),
        "norm_topk_prob": (True, "the weights of a token's experts add up to 1 in this family"),
    },
    wrappers=(qwen_vl("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeVisionModel"),),
)
