"""EXAONE 4: norms on the outputs of attention and MLP and on queries and keys of each head. Only blocks with a window
rotate, if there are some."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import POST_NORMED, QK_NORM
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import FULL, REQUIRED, ROTARY, SLIDING, Family, Raw, windows
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


_TINY: Raw = dict(layer_types=[SLIDING, SLIDING, FULL, SLIDING], sliding_window=7, rope_theta=1e4)
_EXAONE4_5 = Wrapper(
    "exaone4_5",
    "Exaone4_5_ForConditionalGeneration",
    prefix="model.language_model.",
    texts=("exaone4", "exaone4_5_text"),
    untrained=(r"mtp\..+",),
)
_TOWER: Raw = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=96)
_TOWER |= dict(num_key_value_heads=2, fullatt_block_indexes=[0])
_WHOLE: Raw = dict(vision_config=_TOWER, image_token_id=126, video_token_id=125)
_RELEASE: Raw = dict(model_type="exaone4", architectures=["Exaone4ForCausalLM"], hidden_size=5120, head_dim=128)
_RELEASE |= dict(num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8, intermediate_size=27392)
_RELEASE |= dict(vocab_size=102400, max_position_embeddings=131072, rms_norm_eps=1e-05, rope_theta=1000000)
_RELEASE |= dict(rope_scaling=dict(rope_type="llama3", factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0))
_RELEASE["rope_scaling"] |= dict(original_max_position_embeddings=8192)
_RELEASE |= dict(layer_types=([SLIDING] * 3 + [FULL]) * 16, sliding_window=4096, sliding_window_pattern="LLLG")
_RELEASE |= dict(attention_dropout=0.0, bos_token_id=1, eos_token_id=361, hidden_act="silu", pad_token_id=0)
_RELEASE |= dict(initializer_range=0.02, tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True)
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
    example=Example(
        models="EXAONE 4.0, 1.2B and 32B",
        differs="as `olmo3`, with norms per head, and blocks without window or rotation",
        cases={
            "exaone4": _TINY,
            "exaone4 tied, no windows, llama3 rope": dict(
                head_dim=24, layer_types=[FULL] * 4, sliding_window=None, tie_word_embeddings=True
            )
            | dict(rope_parameters=LLAMA3_ROPE),
        },
        wrapped={"exaone4_5": _WHOLE},
        release=_RELEASE,
    ),
)
