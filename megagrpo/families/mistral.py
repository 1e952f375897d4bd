"""Mistral: a Llama whose attention may be limited to a window, of 4096 tokens when config.json says nothing."""

from __future__ import annotations

from megagrpo.families.dense import DENSE
from megagrpo.families.family import Family, no_window

FAMILY = Family("mistral", "MistralForCausalLM", table=lambda hf: DENSE, problems=lambda raw: no_window(raw.get("sliding_window", 4096)))
