"""Shared code of the DeepSeek families: latent attention, and experts with a shared MLP for every token. Imports no
torch."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import ATTENTION, DENSE, EXPERT_BIAS
from megagrpo.families.parts.routed import ROUTED, ROUTED_KEYS, missing_keys, routed_experts, routed_problems
from megagrpo.families.shared.architecture import HfConfig, Mla
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import REQUIRED, Raw, Table, kv_heads

_COMMON: Table = {
    **{key: rule for key, rule in DENSE.items() if "linear_qkv" not in key},
    "self_attention.linear_kv_down_proj.weight": same(ATTENTION + "kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": same(ATTENTION + "kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": same(ATTENTION + "kv_b_proj.weight"),
    **ROUTED,
}
_QUERIES: Table = {"self_attention.linear_q_proj.weight": same(ATTENTION + "q_proj.weight")}
_QUERIES_FROM_LATENT: Table = {
    "self_attention.linear_q_down_proj.weight": same(ATTENTION + "q_a_proj.weight"),
    "self_attention.q_layernorm.weight": same(ATTENTION + "q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": same(ATTENTION + "q_b_proj.weight"),
}

_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_REQUIRED = (*REQUIRED, *_LATENT, "q_lora_rank")
LATENT_KEYS = (*_LATENT, *ROUTED_KEYS, "q_lora_rank")
LATENT_FIXED = {
    "moe_layer_freq": (1, "only 1, experts in every block from first_k_dense_replace on, is supported"),
    "rope_interleave": (True, "only the rotation of neighbouring dimensions is supported, as in vLLM"),
    "rope_interleaved": (True, "only the rotation of neighbouring dimensions is supported, as in vLLM"),
}


def table(hf: HfConfig) -> Table:
    """Return the table of a model that `read` describes."""
    assert hf.mla is not None, "`read` sets it"
    queries = _QUERIES_FROM_LATENT if hf.mla.query_rank else _QUERIES
    return _COMMON | queries | (EXPERT_BIAS if hf.experts and hf.experts.bias else {})


def read(raw: Raw, common: HfConfig, *, normalized: bool, sigmoid: bool = False, bias: bool = False) -> HfConfig:
    """Return the architecture. The families differ in `normalized`, `sigmoid` and `bias` of `Experts`."""
    kv_rank, nope_dim, rope_dim, value_dim = (raw[key] for key in _LATENT)
    mixture = routed_experts(raw, normalized=normalized, sigmoid=sigmoid, bias=bias)
    mla = Mla(raw.get("q_lora_rank"), kv_rank, nope_dim, rope_dim, value_dim)
    return replace(common, mla=mla, head_dim=nope_dim + rope_dim, experts=mixture)


def problems(raw: Raw) -> list[str]:
    """Return why the model cannot be trained."""
    lines = missing_keys(raw)
    if lines or any(key not in raw for key in LATENT_REQUIRED):
        return lines
    lines = routed_problems(raw)
    if kv_heads(raw) != raw["num_attention_heads"]:
        lines.append(f"num_key_value_heads={kv_heads(raw)}; latent attention has one for each query head")
    return lines
