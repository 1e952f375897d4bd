"""HunYuan, dense: head norms after the rotation, whose base is scaled by `alpha`."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import ATTENTION, DENSE
from megagrpo.models.families.family import REQUIRED, Family, Raw, Table, rope
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

LATE_NORMS: Table = {
    "self_attention.q_layernorm.weight": same(ATTENTION + "query_layernorm.weight"),
    "self_attention.k_layernorm.weight": same(ATTENTION + "key_layernorm.weight"),
}
HUNYUAN_REQUIRED = (*REQUIRED, "head_dim", "rms_norm_eps")
HUNYUAN_FIXED = HAS_HEAD_NORMS | {
    "use_cla": (False, "keys and values that blocks share are not supported"),
    "use_rotary_pos_emb": (True, "only rotary positions are supported"),
    "norm_type": ("rms", "only RMSNorm is supported"),
}
# Of classifiers and of models with images; `attention_head_dim` repeats `head_dim`.
HUNYUAN_IGNORED = (
    *("add_classification_head", "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "pool_type"),
    *("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id", "mask_init_id"),
    *("org_vocab_size", "pad_id", "text_end_id", "text_start_id"),
)


def hunyuan_config(raw: Raw, common: HfConfig) -> HfConfig:
    """Return what the HunYuan families share."""
    rotary, dim = rope(raw), common.head_dim
    base = rotary["rope_theta"] * (rotary.get("alpha") or 1.0) ** (dim / (dim - 2))
    return replace(common, qk_norm=True, late_qk_norm=True, rope_theta=base, rope_type="default")


def rope_alpha_problems(raw: Raw) -> list[str]:
    """Return what is wrong with the scale of the rotary base."""
    rotary = rope(raw)
    alpha, kind = rotary.get("alpha"), rotary["rope_type"]
    if kind == "dynamic" and not (isinstance(alpha, (int, float)) and alpha > 0):
        return [f"rotary parameter alpha is {alpha!r}; rope_type dynamic needs a number above 0"]
    return [f"rotary parameter alpha needs rope_type dynamic, not {kind}"] if alpha and kind == "default" else []


FAMILY = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    table=lambda hf: DENSE | LATE_NORMS,
    read=hunyuan_config,
    problems=rope_alpha_problems,
    required=HUNYUAN_REQUIRED,
    ignored=HUNYUAN_IGNORED,
    fixed=HUNYUAN_FIXED,
    rope_types=("default", "dynamic"),
)
