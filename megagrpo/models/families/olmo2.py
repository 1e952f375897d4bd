"""OLMo 2: norms on the outputs of attention and MLP in place of their inputs, and norms of queries and keys over all
heads together."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import POST_NORMED, QK_NORM
from megagrpo.models.families.family import REQUIRED, Family
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

FAMILY = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    table=lambda hf: POST_NORMED | QK_NORM,
    read=lambda raw, common: replace(common, qk_norm=True, wide_qk_norm=True, pre_norms=False, post_norms=True),
    required=(*REQUIRED, "rms_norm_eps"),  # transformers has another default for it in this family
    fixed=HAS_HEAD_NORMS,
)
