"""Command R7B and Command A: a Command R whose blocks have a window, three of four if config.json names none. Blocks
without a window do not rotate."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.cohere import (
    COHERE_FIXED,
    COHERE_IGNORED,
    COHERE_KEYS,
    COHERE_REQUIRED,
    PARALLEL,
    head_problems,
    parallel,
)
from megagrpo.models.families.family import Family, Raw, windows


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    every = raw.get("sliding_window_pattern", 4)
    sizes = windows(raw, raw["sliding_window"], lambda block: (block + 1) % every != 0)
    unrotated = frozenset(block for block, size in enumerate(sizes) if size is None)
    return replace(parallel(raw, common, 1e4), windows=sizes, unrotated=unrotated)


def _problems(raw: Raw) -> list[str]:
    every = raw.get("sliding_window_pattern", 4)
    if type(every) is not int or every < 1:
        return [f"sliding_window_pattern is {every!r} in config.json; it must be a positive whole number"]
    return ([] if raw.get("sliding_window") else ["config.json lacks sliding_window"]) + head_problems(raw)


def _served_flags(hf: HfConfig) -> dict[str, Raw | str]:
    """Return the window with which vLLM lets a token see as many as transformers does: vLLM adds one."""
    size = next(filter(None, hf.windows), None)
    key = {} if size is None else {"sliding_window": size - 1}
    return {"--hf-overrides": key} if key else {}


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    table=lambda hf: PARALLEL,
    read=_read,
    problems=_problems,
    required=(*COHERE_REQUIRED, "sliding_window"),
    keys=(*COHERE_KEYS, "sliding_window", "sliding_window_pattern", "layer_types"),
    ignored=(*COHERE_IGNORED, "_sliding_window_pattern"),
    fixed=COHERE_FIXED,
    served_flags=_served_flags,
)
