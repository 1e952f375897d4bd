"""Arcee's AFM: a Llama whose MLP has no gate and squares the ReLU."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import DENSE, UNGATED
from megagrpo.models.families.family import REQUIRED, Family

FAMILY = Family(
    "arcee",
    "ArceeForCausalLM",
    table=lambda hf: DENSE | UNGATED,
    read=lambda raw, common: replace(common, activation="relu2"),
    required=(*REQUIRED, "rms_norm_eps"),
    fixed={"hidden_act": ("relu2", "only relu2 is supported for this family")},
)
