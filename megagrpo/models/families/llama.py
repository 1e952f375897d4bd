"""Llama 2, 3 and derived models, for example SmolLM2: the base of the other families."""

from __future__ import annotations

from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.example import LLAMA3_ROPE, TINY_SIGLIP, Example
from megagrpo.models.families.family import Family, Raw
from megagrpo.models.families.image_models import LLAMA_SIZES, around

_TINY_IDEFICS: Raw = dict(image_token_id=126, tie_word_embeddings=True, pad_token_id=0)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    table=lambda hf: DENSE,
    wrappers=around(LLAMA_SIZES, "llava", "llava_next", "internvl", "smolvlm", "idefics3"),
    example=Example(
        models="Llama 2 and 3.x, SmolLM2",
        differs="",
        cases={
            "llama tied": dict(tie_word_embeddings=True),
            "llama untied": dict(tie_word_embeddings=False),
            "llama llama3 rope": dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
            "llama linear rope": dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
        },
        wrapped={
            "llava": dict(vision_config=TINY_SIGLIP, image_token_index=126),
            "smolvlm": _TINY_IDEFICS | dict(vision_config=TINY_SIGLIP | dict(model_type="smolvlm_vision")),
            "idefics3": _TINY_IDEFICS | dict(vision_config=TINY_SIGLIP | dict(model_type="idefics3_vision")),
        },
    ),
)
