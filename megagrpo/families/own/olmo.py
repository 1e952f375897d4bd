"""OLMo 2 and 3."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import HAS_HEAD_NORMS, POST_NORMED, QK_NORM
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.family import REQUIRED, SLIDING, Family, Raw, rope, windows

# OLMo 2: norms on the outputs of attention and MLP in place of their inputs, and norms of queries and keys over all
# heads together.
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    table=lambda hf: POST_NORMED | QK_NORM,
    read=lambda raw, common: replace(common, qk_norm=True, wide_qk_norm=True, pre_norms=False, post_norms=True),
    required=(*REQUIRED, "rms_norm_eps"),  # transformers has another default for it in this family
    fixed=HAS_HEAD_NORMS,
)

# OLMo 3: an OLMo 2 with a window in three of four blocks, which rotate by unscaled angles.
_THETA = 500000.0  # transformers' base where config.json names none, and always of blocks with a window


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    local = ((raw.get("rope_parameters") or {}).get(SLIDING) or {}).get("rope_theta", _THETA)
    return replace(
        OLMO2.read(raw, common),
        windows=windows(raw, raw["sliding_window"], lambda block: (block + 1) % 4 != 0),
        rope_theta=rope({"rope_theta": _THETA} | raw)["rope_theta"],
        local_rope_theta=local,
    )


def _problems(raw: Raw) -> list[str]:
    local = (raw.get("rope_parameters") or {}).get(SLIDING) or {}
    kind = local.get("rope_type", "default")
    return [] if kind == "default" else [f"rope_type {kind!r} in blocks with a window is not supported"]


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    read=_read,
    problems=_problems,
    required=(*OLMO2.required, "sliding_window"),
    keys=("sliding_window", "layer_types"),
    local_rope=True,
)
