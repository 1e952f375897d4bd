"""Qwen2 and Qwen2.5: biases on queries, keys and values. A window applies only with `use_sliding_window`, and only from
some block on."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.dense import DENSE, QKV_BIAS
from megagrpo.models.families.family import Family, Raw, windows
from megagrpo.models.families.image_models import QWEN_SIZES, around
from megagrpo.models.families.qwen_omni import QWEN2_5_OMNI
from megagrpo.models.families.vision import axis_problems, qwen_vision
from megagrpo.models.families.wrapper import Wrapper

UPPER_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")  # read by `upper_windows`


def window(raw: Raw) -> int | None:
    """Return how many tokens a token sees in blocks with a window, or None. Other Qwen families use it too."""
    return raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None


def upper_windows(raw: Raw) -> tuple[int | None, ...]:
    """Return the windows of a dense Qwen: blocks from `max_window_layers` on, unless `layer_types` overrides it."""
    return windows(raw, window(raw), lambda block: block >= raw.get("max_window_layers", 28))


def _qwen2_vl(model_type: str, architecture: str, tower: str) -> Wrapper:
    return Wrapper(
        model_type,
        architecture,
        prefix="model.",
        texts=(f"{model_type}_text",),
        defaults=dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6),
        problems=axis_problems(interleaved=False),
        vision=qwen_vision(tower, interleaved=False),
    )


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    table=lambda hf: DENSE | QKV_BIAS,
    read=lambda raw, common: replace(common, qkv_bias=True, windows=upper_windows(raw)),
    keys=UPPER_WINDOWS,
    ignored=("attention_bias",),  # the biases do not depend on it
    fixed={"qkv_bias": (True, "queries, keys and values of this family have biases")},
    wrappers=(
        _qwen2_vl("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VisionTransformerPretrainedModel"),
        _qwen2_vl("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VisionTransformerPretrainedModel"),
        QWEN2_5_OMNI,
        *around(QWEN_SIZES, "llava", "llava_next", "llava_onevision", "internvl"),
    ),
)
