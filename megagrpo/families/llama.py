"""Llama 2, 3 and derived models, for example SmolLM2: the base of the other families."""

from __future__ import annotations

from megagrpo.families.dense import DENSE
from megagrpo.families.family import Family

FAMILY = Family("llama", "LlamaForCausalLM", table=lambda hf: DENSE)
