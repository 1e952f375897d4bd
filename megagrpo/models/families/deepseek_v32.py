"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys a frozen indexer chooses."""

from __future__ import annotations

from megagrpo.models.families import indexed
from megagrpo.models.families.deepseek import beyond
from megagrpo.models.families.family import Family

FAMILY = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    table=indexed.table,
    read=lambda raw, common: indexed.read(raw, common, interleaved=False),
    problems=indexed.problems,
    required=indexed.INDEXED_REQUIRED,
    keys=indexed.INDEXED_KEYS,
    fixed=indexed.INDEXED_FIXED
    | {"indexer_rope_interleave": (False, "only the rotation of the two halves of the indexer's heads is supported")},
    untrained=beyond,
    gpu_only=indexed.GPU_ONLY,
    rope_types=("default", "yarn"),
    layer_types=indexed.INDEXED_LAYERS,
)
