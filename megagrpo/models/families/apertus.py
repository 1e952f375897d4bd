"""Apertus: a Llama with norms per head, whose MLP has no gate and an activation with trained parameters, xIELU."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same, scalar
from megagrpo.models.families.dense import DENSE, LAYER, MLP, QK_NORM, UNGATED
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
)
