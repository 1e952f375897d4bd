"""Granite 3: a Llama with four scales, of the embedding, the attention scores, the residual branches and the logits."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import Family, Raw

SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def scaled(raw: Raw, common: HfConfig) -> HfConfig:
    """Return the architecture with the scales of config.json; an absent scale is 1, that of the scores too."""
    embedding, attention, residual, logits = (raw.get(key, 1.0) for key in SCALES)
    return replace(
        common, embedding_scale=embedding, softmax_scale=attention, residual_scale=residual, logit_scale=1 / logits
    )


def scale_problems(raw: Raw) -> list[str]:
    """Return scales with invalid values."""
    scales = {key: raw[key] for key in SCALES if key in raw}
    wrong = {key: value for key, value in scales.items() if not isinstance(value, (int, float)) or value <= 0}
    return [f"{key} is {value!r} in config.json; it must be a number above 0" for key, value in wrong.items()]


FAMILY = Family(
    "granite",
    "GraniteForCausalLM",
    table=lambda hf: DENSE,
    read=scaled,
    problems=scale_problems,
    keys=SCALES,
)
