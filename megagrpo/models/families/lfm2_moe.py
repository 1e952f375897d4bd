"""LFM2 with experts in all but the first blocks, chosen by the sigmoid of the router's logits plus a bias that is not
trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import LAYER, experts
from megagrpo.models.families.example import Example
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
from megagrpo.models.families.lfm2 import CONV, LFM2, LFM2_FIXED, TINY_LFM2, convolved
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


_TINY: Raw = TINY_LFM2 | dict(num_dense_layers=1, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
_RELEASE_TYPES = [FULL if block in (2, 6, 10, 14, 18, 21) else CONV for block in range(24)]
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
    example=Example(
        models="LFM2-8B-A1B, LFM2-24B-A2B",
        differs="as `lfm2`, with experts, also chosen by a bias",
        cases={
            "lfm2_moe": _TINY | dict(layer_types=[CONV, CONV, FULL, CONV]),
            "lfm2_moe without bias": _TINY
            | dict(layer_types=[FULL, CONV] * 2, use_expert_bias=False)
            | dict(routed_scaling_factor=1.5),
        },
        drift=1e-5,
        release=dict(
            model_type="lfm2_moe",
            architectures=["Lfm2MoeForCausalLM"],
            bos_token_id=1,
            conv_L_cache=3,
            conv_bias=False,
            dtype="bfloat16",
            eos_token_id=7,
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=7168,
            layer_types=_RELEASE_TYPES,
            max_position_embeddings=128000,
            moe_intermediate_size=1792,
            norm_eps=1e-05,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
            num_hidden_layers=24,
            num_key_value_heads=8,
            pad_token_id=0,
            rope_theta=1000000.0,
            routed_scaling_factor=1.0,
            tie_embedding=True,
            transformers_version="4.56.1",
            use_cache=True,
            use_expert_bias=True,
            vocab_size=65536,
        ),
    ),
)
