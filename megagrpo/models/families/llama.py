"""Llama 2, 3 and derived models, for example SmolLM2: the base of the other families. Mistral: a Llama whose attention
may have a window, of 4096 tokens if config.json does not set one. Mixtral: a Mistral with a mixture of experts in every
block; the weights of a token's experts always sum to 1. Phi-3 and Phi-4 (both are called phi3): a Llama with fused
projections, which may rotate only a part of each head."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import qkv
from megagrpo.models.families.dense import ATTENTION, DENSE, GATE_UP, experts
from megagrpo.models.families.family import (
    EXPERT_KEYS,
    REQUIRED,
    Family,
    Raw,
    expert_problems,
    mixture,
    rope,
    rotated_share,
    windows,
)

LLAMA = Family("llama", "LlamaForCausalLM", table=lambda hf: DENSE)


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    table=lambda hf: DENSE,
    read=lambda raw, common: replace(common, windows=windows(raw, raw.get("sliding_window", 4096))),
    keys=("sliding_window",),
)


_MIXTRAL_TABLE = DENSE | experts("block_sparse_moe", "w1", "w3", "w2")


def _mixtral(raw: Raw, common: HfConfig) -> HfConfig:
    # transformers has other defaults for this family than for Llama.
    norm_eps, theta = raw.get("rms_norm_eps", 1e-5), rope({"rope_theta": 1e6} | raw)["rope_theta"]
    return replace(
        common,
        norm_eps=norm_eps,
        rope_theta=theta,
        experts=mixture(raw),
        windows=windows(raw, raw.get("sliding_window")),
    )


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    table=lambda hf: _MIXTRAL_TABLE,
    read=_mixtral,
    problems=expert_problems,
    keys=("sliding_window", *EXPERT_KEYS),
)


_PHI3_TABLE = DENSE | GATE_UP | {"self_attention.linear_qkv.weight": qkv(ATTENTION + "qkv_proj.weight")}


def _phi3_problems(raw: Raw) -> list[str]:
    rotary, problems = rope(raw), []
    if rotary["rope_type"] != "longrope":
        return []
    for key in ("factor", "attention_factor", "short_mscale", "long_mscale"):
        if rotary.get(key) is not None:
            said = f"rotary parameter {key} is {rotary[key]}, which transformers and vLLM read differently"
            problems.append(f"{said}; remove it")
    if not {"hidden_size", "num_attention_heads"} <= raw.keys():
        return problems
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    wanted = int(head_dim * rotated_share(raw, 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if (count := len(rotary.get(key) or [])) != wanted:
            problems.append(f"rotary parameter {key} has {count} numbers; a head needs {wanted}")
    return problems


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    table=lambda hf: _PHI3_TABLE,
    read=lambda raw, common: replace(common, windows=windows(raw, raw.get("sliding_window"))),
    problems=_phi3_problems,
    required=(*REQUIRED, "rms_norm_eps"),  # transformers has another default for it in this family
    keys=("sliding_window", "original_max_position_embeddings"),
    fixed=dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1, "only 1, as in Phi-4-mini, is supported")),
    rope_types=("default", "longrope"),
    partial_rotary_factor=1.0,
)
