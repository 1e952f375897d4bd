"""Falcon-H1: every block has attention and Mamba-2, which read the same normed input. Factors multiply their inputs and
outputs, and those of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.families.parts.llama_table import DENSE, LAYER
from megagrpo.families.parts.mamba import FLOAT32_STATES, mamba2, mamba_problems, mamba_rows
from megagrpo.families.shared.architecture import BesideAttention, HfConfig
from megagrpo.families.shared.blocks import gated, same
from megagrpo.families.shared.family import REQUIRED, Family, Raw, Table
from megagrpo.families.shared.vision import ROTARY

_NORM, _MLP = LAYER + "pre_ff_layernorm.weight", LAYER + "feed_forward."
_TABLE: Table = DENSE | {
    "decoder.final_norm.weight": same("model.final_layernorm.weight"),
    "pre_mlp_layernorm.weight": same(_NORM),
    "mlp.linear_fc1.layer_norm_weight": same(_NORM),
    "mlp.linear_fc1.weight": gated(_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    "mlp.linear_fc2.weight": same(_MLP + "down_proj.weight"),
}
_SIZES = tuple(f"mamba_{key}" for key in ("n_heads", "d_head", "n_groups", "d_state", "d_conv"))
_ATTENTION = ("attention_in_multiplier", "attention_out_multiplier")
_MIXER = ("ssm_in_multiplier", "ssm_out_multiplier")
_OUTER = ("embedding_multiplier", "lm_head_multiplier", "key_multiplier")
_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}  # and their lengths
_OTHER = ("mamba_d_ssm", "mamba_expand", "mamba_conv_bias", "mamba_rms_norm", "mamba_norm_before_gate")


def _table(hf: HfConfig) -> Table:
    rows = mamba_rows(hf, "mamba.", "input_layernorm.weight")
    inside = {key: rule for key, rule in rows.items() if "layer_norm" not in key and key != "norm.weight"}
    return _TABLE | {f"self_attention.{key}": rule for key, rule in inside.items()}


def _factor(raw: Raw, key: str) -> float:
    return float(1.0 if raw.get(key) is None else raw[key])


def _factors(raw: Raw, key: str) -> tuple[float, ...]:
    return tuple(map(float, raw.get(key) or [1.0] * _LISTS[key]))


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    embedding, head, keys = (_factor(raw, key) for key in _OUTER)
    gate, output = _factors(raw, "mlp_multipliers")
    blocks = frozenset(range(common.num_layers))
    mamba = mamba2(raw, _SIZES, blocks, bool(raw.get("mamba_conv_bias", True)))
    return replace(
        common,
        norm_eps=raw.get("rms_norm_eps", 1e-5),
        embedding_scale=embedding,
        logit_scale=head,
        softmax_scale=keys * common.head_dim**-0.5,
        recurrence=replace(mamba, normed=bool(raw.get("mamba_rms_norm")), scales=_factors(raw, "ssm_multipliers")),
        beside_attention=BesideAttention(*(_factor(raw, key) for key in (*_ATTENTION, *_MIXER))),
        mlp_scales=(gate, output),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problems(raw: Raw) -> list[str]:
    problems = [
        f"{key} is {raw[key]!r} in config.json; it must be a number"
        for key in (*_ATTENTION, *_MIXER, *_OUTER)
        if raw.get(key) is not None and not _is_number(raw[key])
    ]
    for key, count in _LISTS.items():
        values = [1.0] * count if raw.get(key) is None else raw[key]
        if not isinstance(values, list) or len(values) != count or not all(map(_is_number, values)):
            problems.append(f"{key} is {values!r} in config.json; it must be {count} numbers")
    sizes = mamba_problems(raw, _SIZES)
    if not sizes:
        inner = raw.get("mamba_d_ssm") or raw.get("mamba_expand", 2) * raw.get("hidden_size", 0)
        if (wide := raw["mamba_n_heads"] * raw["mamba_d_head"]) != inner:
            sizes = [
                f"mamba_n_heads x mamba_d_head = {wide} is not mamba_d_ssm, or mamba_expand x hidden_size, {inner}"
            ]
    if raw.get("mamba_rms_norm") and raw.get("mamba_norm_before_gate", True):
        problems.append("mamba_norm_before_gate=True is not supported: vLLM normalises after the gate; set it to false")
    if not any((part or {}).get("rope_theta") for part in (raw, *(raw.get(key) for key in ROTARY))):
        problems.append("config.json lacks rope_theta, for which transformers and vLLM have different defaults")
    return problems + sizes


FAMILY = Family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    table=_table,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "num_key_value_heads"),
    keys=(*_SIZES, *_ATTENTION, *_MIXER, *_OUTER, *_LISTS, *_OTHER),
    ignored=("mamba_chunk_size", "num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor", "time_step_limit"),
    fixed=dict.fromkeys(("mamba_proj_bias", "projectors_bias"), (False, "biases on projections are not supported")),
    served_flags=lambda hf: FLOAT32_STATES,
)
