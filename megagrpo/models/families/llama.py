"""Llama 2, 3 and derived models, for example SmolLM2: the base of the other families."""

from __future__ import annotations

from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import Family
from megagrpo.models.families.image_models import LLAMA_SIZES, around

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    table=lambda hf: DENSE,
    wrappers=around(LLAMA_SIZES, "llava", "llava_next", "internvl", "smolvlm", "idefics3"),
)
