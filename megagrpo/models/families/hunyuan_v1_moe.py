"""HunYuan with experts: a HunYuan with a mixture of experts and a shared MLP of the same width in every block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, MLP, experts, shared_experts
from megagrpo.models.families.family import Family, Raw, expert_problems, mixture
from megagrpo.models.families.hunyuan_v1_dense import (
    HUNYUAN_FIXED,
    HUNYUAN_IGNORED,
    HUNYUAN_REQUIRED,
    LATE_NORMS,
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
)
