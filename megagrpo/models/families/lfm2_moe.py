"""LFM2 with experts in all but the first blocks, chosen by the sigmoid of the router's logits plus a bias that is not
trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import LAYER, experts
from megagrpo.models.families.family import (
    EXPERT_KEYS,
    FULL,
    LINEAR,
    REQUIRED,
    Family,
    Raw,
    expert_problems,
    mixture,
)
from megagrpo.models.families.lfm2 import CONV, LFM2, LFM2_FIXED, convolved
from megagrpo.models.families.routed import NORMALIZED

_TABLE = LFM2 | experts("feed_forward", "w1", "w3", "w2")
_BIAS = {"mlp.router.expert_bias": same(LAYER + "feed_forward.expert_bias")}
_DENSE = "num_dense_layers"


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    blocks, size = frozenset(range(raw[_DENSE], common.num_layers)), raw["moe_intermediate_size"]
    scale, bias = raw.get("routed_scaling_factor", 1.0), raw.get("use_expert_bias", True)
    chosen = mixture(raw, intermediate_size=size, blocks=blocks, sigmoid=True, bias=bias, scale=scale)
    return replace(convolved(raw, common), experts=chosen, mixture_module="feed_forward.")


def _problems(raw: Raw) -> list[str]:
    problems = expert_problems(raw, ("moe_intermediate_size",))
    if not isinstance(raw.get(_DENSE), int) or not 0 <= raw[_DENSE] < raw.get("num_hidden_layers", 0):
        problems.append(f"{_DENSE} is {raw.get(_DENSE)!r} in config.json; it must be less than num_hidden_layers")
    return problems


FAMILY = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    table=lambda hf: _TABLE | (_BIAS if hf.mixture.bias else {}),
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "norm_eps", "conv_L_cache", "layer_types"),
    keys=(
        *("norm_eps", "conv_L_cache", "layer_types", "use_expert_bias", "routed_scaling_factor"),
        *(*EXPERT_KEYS, "moe_intermediate_size", _DENSE),
    ),
    ignored=("rms_norm_eps", "theta"),
    fixed=NORMALIZED | LFM2_FIXED,
    layer_types=(FULL, CONV, LINEAR),
    names={_DENSE: "first_k_dense_replace"},
)
