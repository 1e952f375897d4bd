"""Mistral: a Llama whose attention may have a window, of 4096 tokens if config.json does not set one."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import Family, windows

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    table=lambda hf: DENSE,
    read=lambda raw, common: replace(common, windows=windows(raw, raw.get("sliding_window", 4096))),
    keys=("sliding_window",),
)
