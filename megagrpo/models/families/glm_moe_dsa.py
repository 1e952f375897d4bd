"""GLM-5: latent attention and experts of DeepSeek-V3 with sparse attention, whose keys a frozen indexer chooses."""

from __future__ import annotations

from megagrpo.models.families import indexed
from megagrpo.models.families.deepseek import beyond
from megagrpo.models.families.family import Family, Raw

_KINDS = "indexer_types"


def _problems(raw: Raw) -> list[str]:
    lines, kinds = indexed.problems(raw), raw.get(_KINDS)
    if kinds is not None and kinds != ["full"] * raw.get("num_hidden_layers", 0):
        said = f"{_KINDS} does not have 'full' for every block: blocks that share the indexer of another block are not"
        lines.append(f"{said} supported")
    return lines


FAMILY = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    table=indexed.table,
    read=lambda raw, common: indexed.read(raw, common, interleaved=True),
    problems=_problems,
    required=indexed.INDEXED_REQUIRED,
    keys=(*indexed.INDEXED_KEYS, _KINDS),
    fixed=indexed.INDEXED_FIXED
    | {
        "indexer_rope_interleave": (True, "only the rotation of neighbouring dimensions of the indexer is supported"),
        "index_topk_freq": (1, "blocks that share the indexer of another block are not supported"),
        "index_topk_pattern": (None, "blocks that share the indexer of another block are not supported"),
    },
    untrained=beyond,
    gpu_only=indexed.GPU_ONLY,
    rope_types=("default", "yarn"),
    layer_types=indexed.INDEXED_LAYERS,
)
