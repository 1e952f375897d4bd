"""Apertus: a Llama with norms per head, whose MLP has no gate and an activation with trained
parameters, xIELU."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts import llama_table as llama
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import same, scalar
from megagrpo.families.shared.family import FULL, REQUIRED, ROTARY, Family, Raw, rope

_INPUT = same(llama.LAYER + "attention_layernorm.weight")
_MIDDLE = same(llama.LAYER + "feedforward_layernorm.weight")
_XIELU = {"alpha_p": same, "alpha_n": same, "beta": scalar, "eps": scalar}
_TABLE = llama.DENSE | llama.UNGATED | llama.QK_NORM
_TABLE |= {
    "input_layernorm.weight": _INPUT,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT,
    "pre_mlp_layernorm.weight": _MIDDLE,
    "mlp.linear_fc1.layer_norm_weight": _MIDDLE,
    **{f"mlp.activation_func.{key}": r(f"{llama.MLP}act_fn.{key}") for key, r in _XIELU.items()},
}
_POST_NORM = (False, "norms on the outputs of attention and MLP are not supported for this family")


def _problems(raw: Raw) -> list[str]:
    if any(raw.get(key) for key in ROTARY):
        return []
    lacks = "config.json lacks rope_parameters, and transformers rotates by llama3's angles "
    return [lacks + "without them; write those of the release to config.json"]


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    theta = rope({"rope_theta": 12e6} | raw)["rope_theta"]  # transformers' default for this family
    return replace(common, activation="xielu", qk_norm=True, rope_theta=theta)


FAMILY = Family(
    "apertus",
    "ApertusForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "rms_norm_eps"),
    fixed=llama.HAS_HEAD_NORMS
    | {"hidden_act": ("xielu", "only xielu is supported for this family"), "post_norm": _POST_NORM},
    layer_types=(FULL,),
)
