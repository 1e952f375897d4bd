"""Qwen3: queries and keys are normalised head by head."""

from __future__ import annotations

from megagrpo.families.dense import DENSE, QK_NORM
from megagrpo.families.family import Family
from megagrpo.families.qwen2 import upper_windows

FAMILY = Family("qwen3", "Qwen3ForCausalLM", table=lambda hf: DENSE | QK_NORM, read=lambda raw: dict(qk_norm=True) | upper_windows(raw))
