"""Apertus: a Llama with norms per head, whose MLP has no gate and an activation with trained parameters, xIELU."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same, scalar
from megagrpo.models.families.dense import DENSE, LAYER, MLP, QK_NORM, UNGATED
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import FULL, REQUIRED, ROTARY, Family, Raw
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

_INPUT, _MIDDLE = same(LAYER + "attention_layernorm.weight"), same(LAYER + "feedforward_layernorm.weight")
_TABLE = DENSE | UNGATED | QK_NORM
_TABLE |= {"input_layernorm.weight": _INPUT, "self_attention.linear_qkv.layer_norm_weight": _INPUT}
_TABLE |= {"pre_mlp_layernorm.weight": _MIDDLE, "mlp.linear_fc1.layer_norm_weight": _MIDDLE}
_TABLE |= {f"mlp.activation_func.{name}": same(f"{MLP}act_fn.{name}") for name in ("alpha_p", "alpha_n")}
_TABLE |= {f"mlp.activation_func.{name}": scalar(f"{MLP}act_fn.{name}") for name in ("beta", "eps")}


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(common, activation="xielu", qk_norm=True)


def _problems(raw: Raw) -> list[str]:
    if any(raw.get(key) for key in ROTARY):
        return []
    said = "config.json lacks rope_parameters, and transformers rotates by llama3's angles without them"
    return [f"{said}; write those of the release to config.json"]


_TINY: Raw = dict(hidden_act="xielu", pad_token_id=0)
FAMILY = Family(
    "apertus",
    "ApertusForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "rms_norm_eps"),
    fixed=HAS_HEAD_NORMS
    | {
        "hidden_act": ("xielu", "only xielu is supported for this family"),
        "post_norm": (False, "norms on the outputs of attention and MLP are not supported for this family"),
    },
    layer_types=(FULL,),
    example=Example(
        models="Apertus 8B and 70B",
        differs="norms per head, an MLP without a gate, xIELU with trained parameters",
        cases={
            "apertus": _TINY | dict(rope_parameters=LLAMA3_ROPE),
            "apertus tied, unscaled rotation": _TINY
            | dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=100.0)),
        },
        served_dtype="bfloat16",  # of the parameters of xIELU in vLLM, whatever the model's
        release=dict(
            model_type="apertus",
            architectures=["ApertusForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=1,
            eos_token_id=[68, 72],
            hidden_act="xielu",
            hidden_dropout=0.0,
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=21504,
            max_position_embeddings=65536,
            mlp_bias=False,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            pad_token_id=3,
            post_norm=False,
            qk_norm=True,
            rms_norm_eps=1e-05,
            rope_scaling=LLAMA3_ROPE | dict(original_max_position_embeddings=8192),
            rope_theta=12000000,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            transformers_version="4.56.0.dev0",
            use_cache=True,
            vocab_size=131072,
        ),
    ),
)
