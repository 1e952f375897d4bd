"""Qwen2 and Qwen2.5: biases on queries, keys and values. A window applies only with `use_sliding_window`, and only from
some block on."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import DENSE, QKV_BIAS
from megagrpo.models.families.family import Family, Raw, windows

UPPER_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")  # read by `upper_windows`


def window(raw: Raw) -> int | None:
    """Return the number of tokens that a token sees in blocks with a window; None without a window. Other Qwen families
    use it too."""
    return raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None


def upper_windows(raw: Raw) -> tuple[int | None, ...]:
    """Return the windows of a dense Qwen: block `max_window_layers` is the first with one, unless `layer_types`
    overrides it."""
    return windows(raw, window(raw), lambda block: block >= raw.get("max_window_layers", 28))


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    table=lambda hf: DENSE | QKV_BIAS,
    read=lambda raw, common: replace(common, qkv_bias=True, windows=upper_windows(raw)),
    keys=UPPER_WINDOWS,
    ignored=("attention_bias",),  # the biases do not depend on it
    fixed={"qkv_bias": (True, "queries, keys and values of this family have biases")},
)
