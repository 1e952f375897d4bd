"""Phi-3 and Phi-4 (both are called phi3): a Llama with fused projections, which may rotate only a part of each head."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import ATTENTION, DENSE, GATE_UP
from megagrpo.families.shared.blocks import qkv
from megagrpo.families.shared.family import REQUIRED, Family, Raw, rope, rotated_share, windows

_TABLE = DENSE | GATE_UP | {"self_attention.linear_qkv.weight": qkv(ATTENTION + "qkv_proj.weight")}


def _problems(raw: Raw) -> list[str]:
    rotary, problems = rope(raw), []
    if rotary["rope_type"] != "longrope":
        return []
    for key in ("factor", "attention_factor", "short_mscale", "long_mscale"):
        if rotary.get(key) is not None:
            said = f"rotary parameter {key} is {rotary[key]}, which transformers and vLLM read differently"
            problems.append(f"{said}; remove it")
    if not {"hidden_size", "num_attention_heads"} <= raw.keys():
        return problems
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    wanted = int(head_dim * rotated_share(raw, 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if (count := len(rotary.get(key) or [])) != wanted:
            problems.append(f"rotary parameter {key} has {count} numbers; a head needs {wanted}")
    return problems


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    table=lambda hf: _TABLE,
    read=lambda raw, common: replace(common, windows=windows(raw, raw.get("sliding_window"))),
    problems=_problems,
    required=(*REQUIRED, "rms_norm_eps"),  # transformers has another default for it in this family
    keys=("sliding_window", "original_max_position_embeddings"),
    fixed=dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1, "only 1, as in Phi-4-mini, is supported")),
    rope_types=("default", "longrope"),
    partial_rotary_factor=1.0,
)
