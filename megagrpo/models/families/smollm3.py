"""SmolLM3: a Llama with blocks that do not rotate queries and keys, every fourth one if config.json names none."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import Family, Raw, rope


def rotates(raw: Raw) -> list[int]:
    """Return, for each block, 1 if it rotates queries and keys, else 0."""
    every = raw.get("no_rope_layer_interval", 4)
    return raw.get("no_rope_layers") or [int((block + 1) % every != 0) for block in range(raw["num_hidden_layers"])]


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    unrotated = frozenset(block for block in range(common.num_layers) if not rotates(raw)[block])
    tied, theta = raw.get("tie_word_embeddings", True), rope({"rope_theta": 2e6} | raw)["rope_theta"]
    return replace(common, unrotated=unrotated, tied_embeddings=tied, rope_theta=theta)


def _problems(raw: Raw) -> list[str]:
    every, layers = raw.get("no_rope_layer_interval", 4), raw.get("num_hidden_layers")
    if type(every) is not int or every < 1:
        return [f"no_rope_layer_interval is {every!r} in config.json; it must be a positive whole number"]
    if isinstance(layers, int) and len(given := rotates(raw)) < layers:
        return [f"no_rope_layers has {len(given)} entries for num_hidden_layers={layers}"]
    return []


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    table=lambda hf: DENSE,
    read=_read,
    problems=_problems,
    keys=("no_rope_layers", "no_rope_layer_interval"),
    ignored=("sliding_window", "max_window_layers"),  # without `use_sliding_window`, which is refused
)
