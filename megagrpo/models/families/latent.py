"""Shared code of the DeepSeek families: latent attention, and experts with a shared MLP for every token. Imports no
torch."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import Experts, HfConfig, Mla
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import ATTENTION, DENSE, EXPERT_BIAS, GATE_UP_DOWN, experts, shared_experts
from megagrpo.models.families.example import YARN
from megagrpo.models.families.family import REQUIRED, Raw, Table, expert_problems, kv_heads

_COMMON: Table = {
    **{key: rule for key, rule in DENSE.items() if "linear_qkv" not in key},
    "self_attention.linear_kv_down_proj.weight": same(ATTENTION + "kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": same(ATTENTION + "kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": same(ATTENTION + "kv_b_proj.weight"),
    **experts("mlp", *GATE_UP_DOWN),
    **shared_experts("shared_experts"),
}
_QUERIES: Table = {"self_attention.linear_q_proj.weight": same(ATTENTION + "q_proj.weight")}
_QUERIES_FROM_LATENT: Table = {
    "self_attention.linear_q_down_proj.weight": same(ATTENTION + "q_a_proj.weight"),
    "self_attention.q_layernorm.weight": same(ATTENTION + "q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": same(ATTENTION + "q_b_proj.weight"),
}

_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
LATENT_REQUIRED = (*REQUIRED, *_LATENT, "q_lora_rank")
LATENT_KEYS = (
    *(*_LATENT, *_EXPERTS, "q_lora_rank"),
    *("first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group"),
)
LATENT_FIXED = {
    "moe_layer_freq": (1, "only 1, experts in every block from first_k_dense_replace on, is supported"),
    "rope_interleave": (True, "only the rotation of neighbouring dimensions is supported, as in vLLM"),
    "rope_interleaved": (True, "only the rotation of neighbouring dimensions is supported, as in vLLM"),
}


# Heads of 16 + 8 elements, values of 12; three of four blocks have experts.
TINY_LATENT: Raw = dict(
    num_key_value_heads=6,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=32,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
TINY_GROUPS: Raw = dict(
    n_group=4, topk_group=2, routed_scaling_factor=2.0, rope_parameters=YARN | dict(mscale=0.9, mscale_all_dim=0.7)
)
# vLLM's latent attention on CPUs supports one size of latents.
SERVED_LATENT: Raw = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)


def table(hf: HfConfig) -> Table:
    """Return the table of a model that `read` describes."""
    assert hf.mla is not None, "`read` sets it"
    queries = _QUERIES_FROM_LATENT if hf.mla.query_rank else _QUERIES
    return _COMMON | queries | (EXPERT_BIAS if hf.experts and hf.experts.bias else {})


def read(raw: Raw, common: HfConfig, *, normalized: bool, sigmoid: bool = False, bias: bool = False) -> HfConfig:
    """Return the architecture. The families differ in `normalized`, `sigmoid` and `bias` of `Experts`."""
    num_groups, groups_per_token = groups(raw)
    kv_rank, nope_dim, rope_dim, value_dim = (raw[key] for key in _LATENT)
    mixture = Experts(
        count=raw["n_routed_experts"],
        per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        blocks=frozenset(range(raw.get("first_k_dense_replace") or 0, raw["num_hidden_layers"])),
        scale=1.0 if (scale := raw.get("routed_scaling_factor")) is None else scale,
        shared_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
        normalized=normalized,
        sigmoid=sigmoid,
        bias=bias,
        groups=num_groups,
        groups_per_token=groups_per_token,
    )
    mla = Mla(raw.get("q_lora_rank"), kv_rank, nope_dim, rope_dim, value_dim)
    return replace(common, mla=mla, head_dim=nope_dim + rope_dim, experts=mixture)


def groups(raw: Raw) -> tuple[int, int]:
    """Return `groups` and `groups_per_token` of Experts."""
    return raw.get("n_group") or 1, raw.get("topk_group") or 1


def problems(raw: Raw) -> list[str]:
    """Return why the model cannot be trained."""
    lines = [f"config.json lacks {key}" for key in _EXPERTS if not raw.get(key)]
    if lines or any(key not in raw for key in LATENT_REQUIRED):
        return lines
    lines = expert_problems(raw | dict(num_experts=raw["n_routed_experts"]))
    if raw.get("routed_scaling_factor") == 0:
        lines.append("routed_scaling_factor is 0, which disables the experts; set it to its value in training")
    if kv_heads(raw) != raw["num_attention_heads"]:
        lines.append(f"num_key_value_heads={kv_heads(raw)}; latent attention has one for each query head")
    if (raw.get("first_k_dense_replace") or 0) >= raw["num_hidden_layers"]:
        lines.append("first_k_dense_replace leaves no block with experts; set it to less than num_hidden_layers")
    count, of_token = groups(raw)
    if raw["n_routed_experts"] % count or of_token * raw["n_routed_experts"] // count < raw["num_experts_per_tok"]:
        lines.append(
            f"topk_group={of_token} of n_group={count} groups of the {raw['n_routed_experts']} experts do not "
            f"hold the {raw['num_experts_per_tok']} of num_experts_per_tok"
        )
    return lines
