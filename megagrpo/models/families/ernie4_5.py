"""ERNIE 4.5, dense: a Llama that rotates neighbouring dimensions of each head."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import REQUIRED, Family, Raw, rope

ERNIE_FIXED = {
    "use_bias": (False, "biases in the linears are not supported"),
    "rope_interleaved": (True, "this family rotates neighbouring dimensions"),
}


def ernie_config(raw: Raw, common: HfConfig) -> HfConfig:
    """Return what the ERNIE families share. config.json may leave out default values."""
    return replace(
        common,
        rotary_interleaved=True,
        tied_embeddings=raw.get("tie_word_embeddings", True),
        rope_theta=rope({"rope_theta": 500000.0} | raw)["rope_theta"],
        norm_eps=raw.get("rms_norm_eps", 1e-5),
    )


FAMILY = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    table=lambda hf: DENSE,
    read=ernie_config,
    required=(*REQUIRED, "head_dim"),  # transformers has a default for it in this family
    fixed=ERNIE_FIXED,
    ignored=("attention_dropout",),  # transformers ignores it too
)
