"""Heads of Gemma 4's blocks without a window, which differ from those of blocks with one. Imports no torch."""

from __future__ import annotations

from typing import Any

from megagrpo.families.parts.llama_table import ATTENTION, LAYER
from megagrpo.families.shared.architecture import GlobalHeads, HfConfig
from megagrpo.families.shared.blocks import qkv, same
from megagrpo.families.shared.family import FULL, Raw, Table

_BY_BLOCK, _SHARED = "per_layer_config", "attention_k_eq_v"
_WIDTH, _COUNT = "global_head_dim", "num_global_key_value_heads"
HEAD_KEYS = (_BY_BLOCK, _SHARED, _WIDTH, _COUNT)
KEYS_AS_VALUES: Table = {
    "self_attention.linear_qk.weight": qkv(ATTENTION + "{p}_proj.weight", "qk"),
    "self_attention.linear_qk.layer_norm_weight": same(LAYER + "input_layernorm.weight"),
}


def _different(raw: Raw) -> list[dict[str, Any]]:
    """Return the different heads of blocks without a window: published files have two keys, and transformers writes a
    key with all blocks."""
    if raw.get(_BY_BLOCK) is None:
        kv_heads = raw.get(_COUNT) if raw.get(_SHARED) else None
        own = dict(head_dim=raw.get(_WIDTH, 512), num_key_value_heads=kv_heads)
        return [{key: value for key, value in own.items() if value is not None}]
    blocks = (str(block) for block, kind in enumerate(raw["layer_types"]) if kind == FULL)
    heads = [raw[_BY_BLOCK].get(block, {}) for block in blocks]
    return [own for i, own in enumerate(heads) if own not in heads[:i]]


def global_heads(raw: Raw, common: HfConfig) -> GlobalHeads:
    """Return the heads of blocks without a window."""
    heads = dict(head_dim=common.head_dim, num_key_value_heads=common.num_kv_heads) | _different(raw)[0]
    return GlobalHeads(heads["head_dim"], heads["num_key_value_heads"], bool(raw.get(_SHARED)))


def head_problems(raw: Raw) -> list[str]:
    """Return why the heads are not supported: those of all blocks without a window must be the same, and those of all
    others the usual ones."""
    if _has_one_kind(raw):
        return []
    return [f"{_BY_BLOCK} in config.json has other heads than one kind for all blocks without a window"]


def _has_one_kind(raw: Raw) -> bool:
    given = {} if raw.get(_BY_BLOCK) is None else raw[_BY_BLOCK]
    if not isinstance(given, dict) or not all(isinstance(own, dict) for own in given.values()):
        return False
    others = {str(block) for block, kind in enumerate(raw["layer_types"]) if kind != FULL}
    heads = _different(raw)
    known = len(heads) == 1 and not others & given.keys() and heads[0].keys() <= {"head_dim", "num_key_value_heads"}
    return known and all(type(size) is int and size > 0 for size in heads[0].values())
