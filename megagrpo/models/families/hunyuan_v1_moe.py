"""HunYuan with experts: a HunYuan with a mixture of experts and a shared MLP of the same width in every block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, MLP, experts, shared_experts
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import Family, Raw, expert_problems, mixture
from megagrpo.models.families.hunyuan_v1_dense import (
    HUNYUAN_FIXED,
    HUNYUAN_IGNORED,
    HUNYUAN_REQUIRED,
    LATE_NORMS,
    TINY_ALPHA,
    hunyuan_config,
    rope_alpha_problems,
)

_TABLE = DENSE | LATE_NORMS | experts("mlp", *GATE_UP_DOWN) | shared_experts("shared_mlp")
_TABLE |= {"mlp.router.weight": same(MLP + "gate.wg.weight")}


def _one(value: Any) -> Any:
    """Return the value of all blocks, given alone or as a list with one for each block; None if they differ."""
    values = value if isinstance(value, list) else [value]
    return values[0] if values and all(other == values[0] for other in values) else None


def _usual(raw: Raw) -> Raw:
    return raw | dict(num_experts_per_tok=_one(raw.get("moe_topk")))


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(hunyuan_config(raw, common), experts=mixture(_usual(raw), shared_size=raw["intermediate_size"]))


def _problems(raw: Raw) -> list[str]:
    lines = rope_alpha_problems(raw)
    width = _one(raw.get("moe_intermediate_size", raw.get("intermediate_size")))
    if type(_one(raw.get("moe_topk"))) is not int:
        return [*lines, f"moe_topk is {raw.get('moe_topk')!r}; it must be one whole number for all blocks"]
    if width != raw.get("intermediate_size"):
        lines.append("moe_intermediate_size differs from intermediate_size, which transformers reads in its place")
    if _one(raw.get("num_shared_expert", 1)) != 1:
        lines.append("num_shared_expert is not 1 in every block; transformers has one shared MLP")
    return lines + expert_problems(_usual(raw))


FAMILY = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    required=HUNYUAN_REQUIRED,
    keys=("num_experts", "num_local_experts", "moe_topk", "num_shared_expert"),
    # How the first training dropped tokens; transformers and vLLM drop none. `_problems` compares the width.
    ignored=(
        *HUNYUAN_IGNORED,
        "moe_intermediate_size",
        "capacity_factor",
        "moe_drop_tokens",
        "moe_random_routing_dropped_token",
    ),
    fixed=HUNYUAN_FIXED
    | {
        "use_mixed_mlp_moe": (True, "experts without a shared MLP are not supported"),
        "moe_layer_num_skipped": (0, "blocks without experts are not supported"),
        "norm_topk_prob": (True, "only weights of a token's experts that add up to 1 are supported"),
        "routed_scaling_factor": (1.0, "transformers does not read it; only 1 is supported"),
        "group_limited_greedy": (False, "groups of experts are not supported"),
    },
    rope_types=("default", "dynamic"),
    names=dict(moe_topk="num_experts_per_tok", moe_intermediate_size="intermediate_size"),
    example=Example(
        models="Hunyuan-A13B",
        differs="as `hunyuan_v1_dense`, experts and a shared MLP",
        cases={
            "hunyuan_v1_moe": dict(head_dim=24, num_experts=8, moe_topk=3),
            "hunyuan_v1_moe tied, alpha": dict(head_dim=24, num_experts=4, moe_topk=[2] * 4)
            | dict(tie_word_embeddings=True, rope_parameters=TINY_ALPHA),
        },
        served=dict(intermediate_size=96),
        release=dict(
            model_type="hunyuan_v1_moe",
            architectures=["HunYuanMoEV1ForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            attention_head_dim=128,
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=3072,
            max_position_embeddings=32768,
            moe_intermediate_size=[3072] * 32,
            moe_topk=[8] * 32,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_experts=64,
            num_hidden_layers=32,
            num_key_value_heads=8,
            num_shared_expert=[1] * 32,
            rms_norm_eps=1e-05,
            rope_scaling=dict(
                alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0, type="dynamic"
            ),
            rope_theta=10000.0,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            use_cache=True,
            use_cla=False,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            vocab_size=128167,
        ),
    ),
)
