"""Gemma 4, the dense text model: Gemma 3 with wider heads in blocks without a window, whose keys may be their values,
and a factor on the output of each block. Per-layer inputs, shared keys and experts are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.models.families.architecture import GlobalHeads, HfConfig
from megagrpo.models.families.blocks import qkv, same
from megagrpo.models.families.dense import ATTENTION, LAYER, QK_NORM
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import FULL, REQUIRED, SLIDING, Family, Raw, Table, rope, windows
from megagrpo.models.families.gemma2 import GEMMA_FIXED, SANDWICH, cap_problems, gemma_config
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.wrapper import Wrapper

_TABLE: Table = SANDWICH | QK_NORM | {"block_scale": same(LAYER + "layer_scalar")}
_KEYS_AS_VALUES: Table = {
    "self_attention.linear_qk.weight": qkv(ATTENTION + "{p}_proj.weight", "qk"),
    "self_attention.linear_qk.layer_norm_weight": same(LAYER + "input_layernorm.weight"),
}
_BY_BLOCK, _SHARED = "per_layer_config", "attention_k_eq_v"


def _global_heads(raw: Raw) -> list[dict[str, Any]]:
    """Return the different heads of blocks without a window: published files have two keys, and transformers writes a
    key with all blocks."""
    if raw.get(_BY_BLOCK) is None:
        kv_heads = raw.get("num_global_key_value_heads") if raw.get(_SHARED) else None
        own = dict(head_dim=raw.get("global_head_dim", 512), num_key_value_heads=kv_heads)
        return [{key: value for key, value in own.items() if value is not None}]
    blocks = (str(block) for block, kind in enumerate(raw["layer_types"]) if kind == FULL)
    heads = [raw[_BY_BLOCK].get(block, {}) for block in blocks]
    return [own for i, own in enumerate(heads) if own not in heads[:i]]


def _local_rope(raw: Raw) -> dict[str, Any]:
    return {"rope_theta": 10000.0} | ((raw.get("rope_parameters") or {}).get(SLIDING) or {})


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    heads = dict(head_dim=common.head_dim, num_key_value_heads=common.num_kv_heads) | _global_heads(raw)[0]
    return replace(
        gemma_config(raw, common),
        softmax_scale=1.0,
        centred_norms=False,
        qk_norm=True,
        unit_value_norm=True,
        block_scales=True,
        global_heads=GlobalHeads(heads["head_dim"], heads["num_key_value_heads"], bool(raw.get(_SHARED))),
        windows=windows(raw, raw["sliding_window"], lambda block: False),
        partial_rotary_factor=1.0,  # the angles of the other dimensions are 0
        rope_theta=rope({"rope_theta": 1e6} | raw)["rope_theta"],
        local_rope_theta=_local_rope(raw)["rope_theta"],
        logit_cap=raw.get("final_logit_softcapping"),
    )


def _problems(raw: Raw) -> list[str]:
    problems, local, types = cap_problems(raw), _local_rope(raw), raw.get("layer_types") or []
    if local.get("rope_type", "default") != "default" or local.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"{SLIDING} in rope_parameters is {local}; only unscaled angles of whole heads are supported")
    if SLIDING not in types or types[-1] != FULL:
        problems.append(f"layer_types must name {SLIDING} and end with {FULL}")
    elif not _has_one_kind(raw, types):
        problems.append(f"{_BY_BLOCK} in config.json has other heads than one kind for all blocks without a window")
    if raw.get("hidden_size_per_layer_input", 256):
        problems.append("hidden_size_per_layer_input: inputs per layer (E2B, E4B) are unsupported: docs/add_a_model.md")
    if raw.get("use_bidirectional_attention") not in (None, "vision"):
        problems.append("use_bidirectional_attention: only causal attention of texts is supported")
    return problems


def _has_one_kind(raw: Raw, types: list[str]) -> bool:
    """Whether all blocks without a window have the same heads, and all others the usual ones."""
    given = {} if raw.get(_BY_BLOCK) is None else raw[_BY_BLOCK]
    if not isinstance(given, dict) or not all(isinstance(own, dict) for own in given.values()):
        return False
    others = {str(block) for block, kind in enumerate(types) if kind != FULL}
    heads = _global_heads(raw)
    known = len(heads) == 1 and not others & given.keys() and heads[0].keys() <= {"head_dim", "num_key_value_heads"}
    return known and all(type(size) is int and size > 0 for size in heads[0].values())


_EXPERTS = "experts beside an MLP, as in Gemma 4 26B-A4B, are not supported: docs/add_a_model.md"
_TINY: Raw = dict(head_dim=24, per_layer_config={block: dict(head_dim=32) for block in "13"}, pad_token_id=0)
_TINY |= dict(sliding_window=7, layer_types=[SLIDING, FULL] * 2, hidden_size_per_layer_input=0)
_TINY_TOWER: Raw = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
_TINY_TOWER |= dict(num_key_value_heads=4, head_dim=8, position_embedding_size=16)
_TOKENS = {f"{kind}_token_id": 126 for kind in ("image", "video", "audio", "boi", "eoi", "boa")}
_RELEASE: Raw = dict(model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], attention_bias=False)
_RELEASE |= dict(attention_dropout=0.0, attention_k_eq_v=True, dtype="bfloat16")
_RELEASE |= dict(enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=512)
_RELEASE |= dict(head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=5376, hidden_size_per_layer_input=0)
_RELEASE |= dict(layer_types=([SLIDING] * 5 + [FULL]) * 10, max_position_embeddings=262144, vocab_size=262144)
_RELEASE |= dict(intermediate_size=21504, num_attention_heads=32, num_global_key_value_heads=4, num_hidden_layers=60)
_RELEASE |= dict(num_key_value_heads=16, num_kv_shared_layers=0, rms_norm_eps=1e-06)
_ROPE: Raw = dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional")
_RELEASE |= dict(rope_parameters={FULL: _ROPE, SLIDING: dict(rope_theta=10000.0, rope_type="default")})
_RELEASE |= dict(sliding_window=1024, tie_word_embeddings=True, use_bidirectional_attention="vision")
FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    table=lambda hf: _TABLE | (_KEYS_AS_VALUES if hf.global_heads and hf.global_heads.keys_as_values else {}),
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "num_key_value_heads", "head_dim", "sliding_window", "layer_types"),
    keys=(
        *("final_logit_softcapping", "sliding_window", "layer_types", "global_head_dim", "num_global_key_value_heads"),
        *(_BY_BLOCK, _SHARED, "hidden_size_per_layer_input", "use_bidirectional_attention"),
    ),
    ignored=("vocab_size_per_layer_input", "use_double_wide_mlp", "top_k_experts", "moe_intermediate_size"),
    fixed=GEMMA_FIXED
    | HAS_HEAD_NORMS
    | {
        "num_kv_shared_layers": (0, "keys shared by blocks, as in Gemma 4 E2B, are not supported: docs/add_a_model.md"),
        "enable_moe_block": (False, _EXPERTS),
        "num_experts": (None, _EXPERTS),
    },
    rope_types=("proportional",),
    local_rope=True,
    partial_rotary_factor=1.0,
    merged_only=("k_proj",),  # vLLM has no adapter for the values that are keys
    wrappers=(Wrapper("gemma4", "Gemma4ForConditionalGeneration", prefix="model.language_model."),),
    example=Example(
        models="Gemma 4 31B, its text model",
        differs="as `gemma3_text`, with other heads in blocks without a window, norms of values, a factor per block",
        cases={
            "gemma4": _TINY | dict(final_logit_softcapping=2.0),
            "gemma4 keys as values": _TINY
            | dict(attention_k_eq_v=True, tie_word_embeddings=False)
            | dict(per_layer_config={block: dict(head_dim=32, num_key_value_heads=6) for block in "13"}),
        },
        wrapped={"gemma4": dict(vision_config=_TINY_TOWER, **_TOKENS)},
        release=_RELEASE,
        tolerance=5e-5,  # scores are not scaled, so rounding counts more
    ),
)
