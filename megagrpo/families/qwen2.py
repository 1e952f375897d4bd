"""Qwen2 and Qwen2.5: biases on queries, keys and values. A window size in config.json counts only with `use_sliding_window`."""

from __future__ import annotations

from megagrpo.families.dense import DENSE, QKV_BIAS
from megagrpo.families.family import FIXED, Family, Raw, no_window


def window_problems(raw: Raw) -> list[str]:
    """As the other Qwen families have them too."""
    return no_window(raw.get("sliding_window")) if raw.get("use_sliding_window") else []


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    table=lambda hf: DENSE | QKV_BIAS,
    read=lambda raw: dict(qkv_bias=True),
    problems=window_problems,
    fixed={key: rule for key, rule in FIXED.items() if key != "attention_bias"},  # the biases do not depend on this key
)
