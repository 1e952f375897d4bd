"""GLM-4-9B of 2024 and GLM-Edge: GLM-4-0414 without norms on the outputs of attention and MLP."""

from __future__ import annotations

import dataclasses

from megagrpo.models.families import glm4
from megagrpo.models.families.dense import DENSE, GATE_UP, QKV_BIAS

FAMILY = dataclasses.replace(
    glm4.FAMILY,
    model_type="glm",
    architecture="GlmForCausalLM",
    table=lambda hf: DENSE | GATE_UP | (QKV_BIAS if hf.qkv_bias else {}),
    read=lambda raw, common: dataclasses.replace(glm4.FAMILY.read(raw, common), post_norms=False),
    wrappers=(),
)
