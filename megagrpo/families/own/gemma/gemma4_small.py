"""What Gemma 4 E2B and E4B have besides Gemma 4: inputs per layer, and last blocks that borrow keys and values. Imports
no torch."""

from __future__ import annotations

from typing import Any

from megagrpo.families.parts.llama_table import ATTENTION, LAYER
from megagrpo.families.shared.blocks import same, vocab
from megagrpo.families.shared.family import Raw, Table

_WIDTH, _ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
_BORROWERS, _WIDE = "num_kv_shared_layers", "use_double_wide_mlp"
SMALL_KEYS = (_WIDTH, _ROWS, _BORROWERS, _WIDE)
LAYER_INPUTS: Table = {
    "embedding.layer_inputs.words.weight": vocab("model.embed_tokens_per_layer.weight"),
    "embedding.layer_inputs.projection.weight": same("model.per_layer_model_projection.weight"),
    "embedding.layer_inputs.norm.weight": same("model.per_layer_projection_norm.weight"),
    "layer_input.gate.weight": same(LAYER + "per_layer_input_gate.weight"),
    "layer_input.projection.weight": same(LAYER + "per_layer_projection.weight"),
    "layer_input.norm.weight": same(LAYER + "post_per_layer_input_norm.weight"),
}
BORROWED: Table = {
    "self_attention.linear_q.weight": same(ATTENTION + "q_proj.weight"),
    "self_attention.linear_q.layer_norm_weight": same(LAYER + "input_layernorm.weight"),
}


def small_fields(raw: Raw) -> dict[str, Any]:
    """Return the fields of `HfConfig`. transformers' default of the width is 256."""
    borrowers = raw.get(_BORROWERS) or 0
    wide = bool(borrowers and raw.get(_WIDE))
    return dict(layer_inputs=raw.get(_WIDTH, 256) or 0, borrowers=borrowers, wide_borrowers=wide)


def small_problems(raw: Raw) -> list[str]:
    """Return why inputs per layer and borrowed keys cannot be trained."""
    problems, types, borrowers = [], raw.get("layer_types") or [], raw.get(_BORROWERS) or 0
    width, rows = raw.get(_WIDTH, 256) or 0, raw.get(_ROWS, 262144)
    if type(width) is not int or width < 0 or type(borrowers) is not int or borrowers < 0:
        return [f"{_WIDTH} and {_BORROWERS} must be whole numbers, 0 or more"]
    if width and rows != raw.get("vocab_size"):
        problems.append(f"{_ROWS}={rows} differs from vocab_size={raw.get('vocab_size')}, which is not supported")
    if missing := {*types[len(types) - borrowers :]} - {*types[: len(types) - borrowers]} if borrowers else set():
        problems.append(f"no block before the last {_BORROWERS}={borrowers} has keys and values of {min(missing)}")
    if borrowers and raw.get("enable_moe_block"):
        problems.append(f"{_BORROWERS}={borrowers} beside experts is not supported; no released model has both")
    return problems


def unread(borrowers: int, blocks: int) -> tuple[str, ...]:
    """Return the keys and values of borrowers, which released files have, and nothing reads."""
    numbers = "|".join(map(str, range(blocks - borrowers, blocks)))
    return (rf"model\.layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm)\.weight",) if borrowers else ()
