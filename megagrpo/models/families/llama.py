"""Llama 2, 3 and derived models, for example SmolLM2: the base of the other families."""

from __future__ import annotations

from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import Family

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    table=lambda hf: DENSE,
    example=Example(
        models="Llama 2 and 3.x, SmolLM2",
        differs="",
        cases={
            "llama tied": dict(tie_word_embeddings=True),
            "llama untied": dict(tie_word_embeddings=False),
            "llama llama3 rope": dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
            "llama linear rope": dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
        },
    ),
)
