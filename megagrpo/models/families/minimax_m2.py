"""MiniMax-M2: norms of queries and keys over all heads together, half of each head rotated, and experts in every block
by the sigmoid of the router's logits plus a bias that is not trained. Modules that predict further tokens are not
trained either."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, LAYER, QK_NORM, experts
from megagrpo.models.families.example import YARN, Example
from megagrpo.models.families.family import (
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
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

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


_TINY: Raw = _ROUTING | dict(num_local_experts=8, num_experts_per_tok=3, head_dim=16, rotary_dim=8, pad_token_id=0)
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
    example=Example(
        models="MiniMax-M2, M2.1, M2.5",
        differs="norms of queries and keys over all heads, half of each head rotated, experts also chosen by a bias",
        cases={
            "minimax_m2": _TINY,
            "minimax_m2 few experts, another share, yarn": _TINY
            | dict(num_local_experts=4, num_experts_per_tok=2, rotary_dim=12, rope_parameters=YARN),
        },
        served=dict(intermediate_size=64),
        drift=1e-5,
        release=dict(model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], attn_type_list=[1] * 62)
        | dict(hidden_size=3072, num_hidden_layers=62, num_attention_heads=48, num_key_value_heads=8, head_dim=128)
        | dict(intermediate_size=1536, mlp_intermediate_size=8192, shared_intermediate_size=0, vocab_size=200064)
        | dict(num_local_experts=256, num_experts_per_tok=8, scoring_func="sigmoid", use_routing_bias=True)
        | dict(use_qk_norm=True, qk_norm_type="per_layer", rotary_dim=64, rope_theta=5000000, rms_norm_eps=1e-06)
        | dict(max_position_embeddings=196608, sliding_window=None, shared_moe_mode="sigmoid", hidden_act="silu")
        | dict(use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1, tie_word_embeddings=False)
        | dict.fromkeys(_OTHER_ATTENTION[:3], 1.0)
        | dict(attention_dropout=0.0, router_jitter_noise=0.0, router_aux_loss_coef=0.001, output_router_logits=False)
        | dict(initializer_range=0.02, use_cache=True, transformers_version="4.46.1")
        | dict(
            auto_map={
                "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
                "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
            },
            quantization_config=dict(
                activation_scheme="dynamic",
                fmt="float8_e4m3fn",
                quant_method="fp8",
                weight_block_size=[128, 128],
                modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
            ),
        ),
    ),
)
