"""MiniMax-M2: norms of queries and keys over all heads together, half of each head rotated, and experts in every block
by the sigmoid of the router's logits plus a bias that is not trained. Modules that predict further tokens are not
trained either."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import DENSE, HAS_HEAD_NORMS, LAYER, QK_NORM, experts
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import (
    EXPERT_KEYS,
    REQUIRED,
    Family,
    Raw,
    Table,
    expert_problems,
    mixture,
    rope,
    rotated_share,
)

_TABLE: Table = DENSE | QK_NORM | experts("block_sparse_moe", "w1", "w3", "w2")
_TABLE |= {"mlp.router.expert_bias": same(LAYER + "block_sparse_moe.e_score_correction_bias")}
# Of the first release's names: no code reads them where every block has softmax attention.
_OTHER_ATTENTION = (
    *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    *("mlp_intermediate_size", "shared_moe_mode"),
)
_ROUTING = dict(scoring_func="sigmoid", use_routing_bias=True)  # vLLM reads these keys, transformers does not
# Further tokens: no tensors of theirs are in the model.
_FURTHER_TOKENS = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers")


def _share(raw: Raw) -> float:
    return rotated_share(raw, default=raw["rotary_dim"] / raw["head_dim"])


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(
        common,
        qk_norm=True,
        wide_qk_norm=True,
        partial_rotary_factor=_share(raw),
        rope_theta=rope({"rope_theta": 5e6} | raw)["rope_theta"],  # transformers' default for this family
        experts=mixture(raw, sigmoid=True, bias=True),
    )


def _problems(raw: Raw) -> list[str]:
    lacks = [key for key in _ROUTING if key not in raw]
    problems = [
        f"config.json lacks {key}; set it to {_ROUTING[key]!r}, or vLLM routes tokens another way" for key in lacks
    ]
    problems += expert_problems(raw)
    kinds, size = raw.get("attn_type_list"), raw.get("rotary_dim")
    if kinds is not None and kinds != [1] * len(kinds):
        problems.append(f"attn_type_list={kinds}: only 1, softmax attention in every block, is supported")
    if type(size) is not int or type(raw.get("head_dim")) is not int:  # another line says what is missing
        return problems
    if size > raw["head_dim"]:
        problems.append(f"rotary_dim={size} is more than head_dim={raw['head_dim']}")
    elif size != int(_share(raw) * raw["head_dim"]):
        said = f"rotary_dim={size}, and partial_rotary_factor={_share(raw)} of head_dim={raw['head_dim']}"
        problems.append(f"{said}; set one to match the other")
    return problems


def _untrained(hf: HfConfig) -> tuple[str, ...]:
    return tuple(rf"model\.layers\.{hf.num_layers + i}\..+" for i in range(hf.raw.get("num_mtp_modules") or 0))


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rotary_dim"),
    keys=(*EXPERT_KEYS, "rotary_dim", "attn_type_list", "num_mtp_modules"),
    ignored=(*_OTHER_ATTENTION, *_FURTHER_TOKENS, "sliding_window"),
    fixed={key: (value, f"set it to {value!r}, the only value that is supported") for key, value in _ROUTING.items()}
    | HAS_HEAD_NORMS
    | {
        "qk_norm_type": ("per_layer", "only per_layer, a norm over all heads, is supported"),
        "shared_intermediate_size": (0, "an MLP beside the experts is not supported"),
        "tie_word_embeddings": (False, "vLLM's model has an untied LM head"),
    },
    untrained=_untrained,
    rope_types=("default", "yarn"),
    partial_rotary_factor=0.5,
)
