"""Qwen3: queries and keys are normalised per head."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import DENSE, QK_NORM
from megagrpo.models.families.family import Family
from megagrpo.models.families.qwen2 import UPPER_WINDOWS, upper_windows

HAS_HEAD_NORMS = dict.fromkeys(
    ("use_qk_norm", "qk_norm", "qk_layernorm"), (True, "this family normalises queries and keys")
)
FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    table=lambda hf: DENSE | QK_NORM,
    read=lambda raw, common: replace(common, qk_norm=True, windows=upper_windows(raw)),
    keys=UPPER_WINDOWS,
    fixed=HAS_HEAD_NORMS,
)
