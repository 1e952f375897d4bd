"""EXAONE 4: norms on the outputs of attention and MLP and on queries and keys of each head. Only blocks with a window
rotate, if there are some."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import POST_NORMED, QK_NORM
from megagrpo.models.families.family import REQUIRED, ROTARY, SLIDING, Family, Raw, windows
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.wrapper import Wrapper

_TABLE = POST_NORMED | QK_NORM


def windowed(raw: Raw, common: HfConfig) -> HfConfig:
    """Return the architecture with head norms and windows, of which only blocks with one rotate."""
    seen = windows(raw, raw["sliding_window"], lambda block: False)
    unrotated = frozenset(block for block, window in enumerate(seen) if window is None)
    return replace(common, qk_norm=True, windows=seen, unrotated=unrotated)


def window_problems(raw: Raw) -> list[str]:
    """Return the keys of windows and rotation that are missing or contradict each other."""
    lacking = [key for key in ("sliding_window", "layer_types") if key not in raw]
    lacking += [] if any(raw.get(key) for key in ("rope_theta", *ROTARY)) else ["rope_theta"]
    if lacking:
        return [f"config.json lacks {key}" for key in lacking]
    if (raw["sliding_window"] is not None) != (SLIDING in (raw["layer_types"] or [])):
        said = f"sliding_window={raw['sliding_window']} in config.json does not fit its layer_types"
        return [f"{said}; transformers and vLLM then rotate different blocks. Without {SLIDING} it must be null"]
    return []


_EXAONE4_5 = Wrapper(
    "exaone4_5",
    "Exaone4_5_ForConditionalGeneration",
    prefix="model.language_model.",
    texts=("exaone4", "exaone4_5_text"),
    untrained=(r"mtp\..+",),
)
FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    table=lambda hf: _TABLE,
    read=lambda raw, common: replace(windowed(raw, common), pre_norms=False, post_norms=True),
    problems=window_problems,
    required=(*REQUIRED, "num_key_value_heads", "rms_norm_eps"),
    keys=("sliding_window", "layer_types"),
    ignored=("sliding_window_pattern",),  # `layer_types` decides
    fixed=HAS_HEAD_NORMS | {"reorder_and_qk_norm": (True, "only the order of norms in the releases is supported")},
    wrappers=(_EXAONE4_5,),
)
