"""Llama 2, 3 and derived models, for example SmolLM2: the base of the other families."""

from __future__ import annotations

from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import Family

FAMILY = Family("llama", "LlamaForCausalLM", table=lambda hf: DENSE)
