"""Ministral 3: a Mistral with yarn, whose queries grow with the position as Llama 4's do."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig, QueryScale
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import REQUIRED, Family, Raw, rope, windows
from megagrpo.models.families.mistral import MISTRAL3
from megagrpo.models.families.wrapper import TEXT_CONFIG

_STRENGTH, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    rotary = rope(raw)
    scale = QueryScale(rotary[_STRENGTH], rotary[_LENGTH], frozenset(range(common.num_layers)))
    return replace(common, windows=windows(raw, raw.get("sliding_window")), query_scale=scale)


def _problems(raw: Raw) -> list[str]:
    rotary = rope(raw)
    return [
        f"{key} is {rotary.get(key)!r} in rope_parameters of config.json; it must be a number above 0"
        for key in (_STRENGTH, _LENGTH)
        if not isinstance(rotary.get(key), (int, float)) or rotary[key] <= 0
    ]


def _served_flags(hf: HfConfig) -> dict[str, Raw | str]:
    """Return vLLM's own key of the scale: it does not read the one in `rope_parameters`."""
    scale = hf.query_scale
    assert scale is not None, "Ministral 3 scales queries"
    key = {"llama_4_scaling": {"beta": scale.strength, "original_max_position_embeddings": scale.length}}
    return {"--hf-overrides": key if hf.wrapper is None else {TEXT_CONFIG: key}}


FAMILY = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    table=lambda hf: DENSE,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"),
    keys=("sliding_window",),
    rope_types=("yarn",),
    rope_keys=(_STRENGTH, "max_position_embeddings"),  # transformers ignores the second
    served_flags=_served_flags,
    wrappers=(MISTRAL3,),
)
