"""Seed-OSS: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import DENSE, QKV_BIAS
from megagrpo.models.families.family import REQUIRED, Family

FAMILY = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    table=lambda hf: DENSE | (QKV_BIAS if hf.qkv_bias else {}),
    read=lambda raw, common: replace(common, qkv_bias=raw.get("attention_bias", True)),
    required=(*REQUIRED, "head_dim"),  # transformers has a default for it in this family
    keys=("attention_bias",),  # of queries, keys and values; `attention_out_bias` is refused
    # Releases have 0.1, the value of their pretraining. Neither vLLM nor the trainer drops activations.
    ignored=("attention_dropout", "residual_dropout"),
)
