"""Code World Model: a Llama with windows, in three of four blocks if config.json names none."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import REQUIRED, Family, Raw, windows


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(common, windows=windows(raw, raw["sliding_window"], lambda block: block % 4 != 0))


FAMILY = Family(
    "cwm",
    "CwmForCausalLM",
    table=lambda hf: DENSE,
    read=_read,
    problems=lambda raw: [] if raw.get("sliding_window") else ["config.json lacks sliding_window"],
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window"),
    keys=("sliding_window", "layer_types"),
    ignored=("pretraining_tp",),
    rope_types=("llama3",),  # the rotation of a file without one is llama3 too, with transformers' own factors
)
