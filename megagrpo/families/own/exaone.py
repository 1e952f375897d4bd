"""EXAONE 4 and K-EXAONE."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import DENSE, HAS_HEAD_NORMS, MLP, POST_NORMED, QK_NORM
from megagrpo.families.parts.routed import (
    NORMALIZED,
    ROUTED,
    ROUTED_KEYS,
    mlp_kind_problems,
    routed_experts,
    routed_problems,
)
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import EXPERT_KEYS, REQUIRED, ROTARY, SLIDING, Family, Raw, windows
from megagrpo.families.shared.wrapper import Wrapper

# EXAONE 4: norms on the outputs of attention and MLP and on queries and keys of each head. Only blocks with a window
# rotate, if there are some.
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
EXAONE4 = Family(
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

# K-EXAONE: the attention of EXAONE 4 behind norms of its inputs, and the experts of DeepSeek-V3. Layers for
# predicting several tokens are not trained.
_MOE_TABLE = DENSE | QK_NORM | ROUTED | {"mlp.router.expert_bias": same(MLP + "e_score_correction_bias")}
_DENSE_BLOCKS = 1  # transformers' default of first_k_dense_replace


def _moe_usual(raw: Raw) -> Raw:
    """Return config.json with the usual names of the numbers of experts."""
    scale = raw.get("routed_scaling_factor", 2.5)
    names = dict(n_routed_experts=raw.get("num_experts"), n_shared_experts=raw.get("num_shared_experts", 1))
    dense = raw.get("first_k_dense_replace", _DENSE_BLOCKS)
    return raw | names | dict(routed_scaling_factor=scale, first_k_dense_replace=dense)


def _moe_read(raw: Raw, common: HfConfig) -> HfConfig:
    experts = routed_experts(_moe_usual(raw), normalized=True, sigmoid=True, bias=True)
    return replace(windowed(raw, common), experts=experts)


EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    classes=("ExaoneMoEForCausalLM",),
    table=lambda hf: _MOE_TABLE,
    read=_moe_read,
    problems=lambda raw: (
        window_problems(raw) + routed_problems(_moe_usual(raw)) + mlp_kind_problems(_moe_usual(raw), 1)
    ),
    required=(*REQUIRED, "num_key_value_heads", "rms_norm_eps"),
    keys=(*(*ROUTED_KEYS, *EXPERT_KEYS, "num_shared_experts", "mlp_layer_types"), *("sliding_window", "layer_types")),
    # `layer_types` and `mlp_layer_types` decide
    ignored=("sliding_window_pattern", "is_moe_layer", "num_nextn_predict_layers", "topk_method"),
    fixed=HAS_HEAD_NORMS | NORMALIZED | {"scoring_func": ("sigmoid", "only sigmoid is supported")},
    untrained=lambda hf: (r"mtp\..+",),
)
