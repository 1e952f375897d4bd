"""HunYuan, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.families.parts.llama_table import ATTENTION, DENSE, HAS_HEAD_NORMS, MLP, USUAL_EXPERTS, shared_experts
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import REQUIRED, Family, Raw, Table, expert_problems, mixture, rope

# HunYuan, dense: head norms after the rotation, whose base is scaled by `alpha`.
_LATE_NORMS: Table = {
    "self_attention.q_layernorm.weight": same(ATTENTION + "query_layernorm.weight"),
    "self_attention.k_layernorm.weight": same(ATTENTION + "key_layernorm.weight"),
}


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    rotary, dim = rope(raw), common.head_dim
    base = rotary["rope_theta"] * (rotary.get("alpha") or 1.0) ** (dim / (dim - 2))
    return replace(common, qk_norm=True, late_qk_norm=True, rope_theta=base, rope_type="default")


def _problems(raw: Raw) -> list[str]:
    rotary = rope(raw)
    alpha, kind = rotary.get("alpha"), rotary["rope_type"]
    if kind == "dynamic" and not (isinstance(alpha, (int, float)) and alpha > 0):
        return [f"rotary parameter alpha is {alpha!r}; rope_type dynamic needs a number above 0"]
    return [f"rotary parameter alpha needs rope_type dynamic, not {kind}"] if alpha and kind == "default" else []


HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    table=lambda hf: DENSE | _LATE_NORMS,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "head_dim", "rms_norm_eps"),
    ignored=(  # of classifiers and of models with images; `attention_head_dim` repeats `head_dim`
        *("add_classification_head", "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "pool_type"),
        *("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id", "mask_init_id"),
        *("org_vocab_size", "pad_id", "text_end_id", "text_start_id"),
    ),
    fixed=HAS_HEAD_NORMS
    | {
        "use_cla": (False, "keys and values that blocks share are not supported"),
        "use_rotary_pos_emb": (True, "only rotary positions are supported"),
        "norm_type": ("rms", "only RMSNorm is supported"),
    },
    rope_types=("default", "dynamic"),
)

# HunYuan with experts: a HunYuan with a mixture of experts and a shared MLP of the same width in every block.
_MOE_TABLE = DENSE | _LATE_NORMS | USUAL_EXPERTS | shared_experts("shared_mlp")
_MOE_TABLE |= {"mlp.router.weight": same(MLP + "gate.wg.weight")}


def _one(value: Any) -> Any:
    """Return the value of all blocks, given alone or as a list with one for each block; None if they differ."""
    values = value if isinstance(value, list) else [value]
    return values[0] if values and all(other == values[0] for other in values) else None


def _moe_usual(raw: Raw) -> Raw:
    return raw | dict(num_experts_per_tok=_one(raw.get("moe_topk")))


def _moe_read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(_read(raw, common), experts=mixture(_moe_usual(raw), shared_size=raw["intermediate_size"]))


def _moe_problems(raw: Raw) -> list[str]:
    lines = _problems(raw)
    width = _one(raw.get("moe_intermediate_size", raw.get("intermediate_size")))
    if type(_one(raw.get("moe_topk"))) is not int:
        return [*lines, f"moe_topk is {raw.get('moe_topk')!r}; it must be one whole number for all blocks"]
    if width != raw.get("intermediate_size"):
        lines.append("moe_intermediate_size differs from intermediate_size, which transformers reads in its place")
    if _one(raw.get("num_shared_expert", 1)) != 1:
        lines.append("num_shared_expert is not 1 in every block; transformers has one shared MLP")
    return lines + expert_problems(_moe_usual(raw))


HUNYUAN_V1_MOE = replace(
    HUNYUAN_V1_DENSE,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    table=lambda hf: _MOE_TABLE,
    read=_moe_read,
    problems=_moe_problems,
    keys=("num_experts", "num_local_experts", "moe_topk", "num_shared_expert"),
    # How the first training dropped tokens; transformers and vLLM drop none. `_moe_problems` compares the width.
    ignored=(
        *HUNYUAN_V1_DENSE.ignored,
        *("moe_intermediate_size", "capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token"),
    ),
    fixed=HUNYUAN_V1_DENSE.fixed
    | {
        "use_mixed_mlp_moe": (True, "experts without a shared MLP are not supported"),
        "moe_layer_num_skipped": (0, "blocks without experts are not supported"),
        "norm_topk_prob": (True, "only weights of a token's experts that add up to 1 are supported"),
        "routed_scaling_factor": (1.0, "transformers does not read it; only 1 is supported"),
        "group_limited_greedy": (False, "groups of experts are not supported"),
    },
    names=dict(moe_topk="num_experts_per_tok", moe_intermediate_size="intermediate_size"),
)
