"""OLMo 3: an OLMo 2 with a window in three of four blocks, which rotate by unscaled angles."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families import olmo2
from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.family import SLIDING, Raw, rope, windows

_THETA = 500000.0  # transformers' base where config.json names none, and always of blocks with a window


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    local = ((raw.get("rope_parameters") or {}).get(SLIDING) or {}).get("rope_theta", _THETA)
    return replace(
        olmo2.FAMILY.read(raw, common),
        windows=windows(raw, raw["sliding_window"], lambda block: (block + 1) % 4 != 0),
        rope_theta=rope({"rope_theta": _THETA} | raw)["rope_theta"],
        local_rope_theta=local,
    )


def _problems(raw: Raw) -> list[str]:
    local = (raw.get("rope_parameters") or {}).get(SLIDING) or {}
    kind = local.get("rope_type", "default")
    return [] if kind == "default" else [f"rope_type {kind!r} in blocks with a window is not supported"]


FAMILY = replace(
    olmo2.FAMILY,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    read=_read,
    problems=_problems,
    required=(*olmo2.FAMILY.required, "sliding_window"),
    keys=("sliding_window", "layer_types"),
    local_rope=True,
)
