"""GLM-4-0414, alone and inside GLM-4.1V: gate and up projection in one weight, biases on queries,
keys and values, partial rotation of neighbouring dimensions, and norms on the outputs of attention
and MLP."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, GATE_UP, LAYER, QKV_BIAS
from megagrpo.models.families.family import REQUIRED, Family, Raw, Table
from megagrpo.models.families.wrapper import Wrapper

_TABLE: Table = DENSE | GATE_UP
_TABLE |= {
    "self_attention.post_norm.weight": same(LAYER + "post_self_attn_layernorm.weight"),
    "mlp.post_norm.weight": same(LAYER + "post_mlp_layernorm.weight"),
}


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    qkv_bias = raw.get("attention_bias", True)
    return replace(common, qkv_bias=qkv_bias, rotary_interleaved=True, post_norms=True)


FAMILY = Family(
    "glm4",
    "Glm4ForCausalLM",
    table=lambda hf: _TABLE | (QKV_BIAS if hf.qkv_bias else {}),
    read=_read,
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps"),
    keys=("attention_bias",),  # of queries, keys and values; the output projection never has one
    fixed={"rope_interleaved": (True, "this family rotates neighbouring dimensions")},
    rope_types=("default", "yarn"),
    partial_rotary_factor=0.5,
    wrappers=(
        Wrapper(
            "glm4v",
            "Glm4vForConditionalGeneration",
            prefix="model.language_model.",
            texts=("glm4v_text",),
            defaults=dict(head_dim=128),
            required=("partial_rotary_factor", "attention_bias"),
        ),
    ),
)
