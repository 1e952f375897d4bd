"""Qwen3: queries and keys are normalised per head. Qwen3-MoE: a Qwen3 with a mixture of experts in some blocks; in all
blocks if config.json does not name any."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, QK_NORM, experts
from megagrpo.models.families.family import EXPERT_KEYS, Family, Raw, expert_problems, mixture, windows
from megagrpo.models.families.image_models import QWEN_SIZES, around
from megagrpo.models.families.qwen2 import UPPER_WINDOWS, upper_windows, window
from megagrpo.models.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE, STACKED_EXPERTS
from megagrpo.models.families.qwen_omni import QWEN3_OMNI

HAS_HEAD_NORMS = dict.fromkeys(
    ("use_qk_norm", "qk_norm", "qk_layernorm"), (True, "this family normalises queries and keys")
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    table=lambda hf: DENSE | QK_NORM,
    read=lambda raw, common: replace(common, qk_norm=True, windows=upper_windows(raw)),
    keys=UPPER_WINDOWS,
    fixed=HAS_HEAD_NORMS,
    wrappers=(QWEN3_VL, *around(QWEN_SIZES | dict(head_dim=128), "internvl")),
)


_MOE_TABLE = DENSE | QK_NORM | experts("mlp", *GATE_UP_DOWN)


def moe_blocks(raw: Raw) -> frozenset[int]:
    """Return the blocks with experts: each `decoder_sparse_step`th, but those of `mlp_only_layers`."""
    dense, every = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step") or 1
    return frozenset(b for b in range(raw["num_hidden_layers"]) if b not in dense and (b + 1) % every == 0)


def _moe(raw: Raw, common: HfConfig) -> HfConfig:
    normalized, size = raw.get("norm_topk_prob", False), raw["moe_intermediate_size"]
    experts = mixture(raw, intermediate_size=size, normalized=normalized, blocks=moe_blocks(raw))
    return replace(common, qk_norm=True, experts=experts, windows=windows(raw, window(raw)))


def _moe_problems(raw: Raw) -> list[str]:
    problems = expert_problems(raw, ("moe_intermediate_size",))
    if not problems and "num_hidden_layers" in raw and not moe_blocks(raw):
        problems.append("mlp_only_layers and decoder_sparse_step leave no block with experts; a dense model is a qwen3")
    return problems


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    table=lambda hf: _MOE_TABLE | (STACKED_EXPERTS if hf.wrapper == QWEN3_VL_MOE else {}),
    read=_moe,
    problems=_moe_problems,
    keys=(
        *(*EXPERT_KEYS, "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),
        *("use_sliding_window", "sliding_window"),
    ),
    ignored=("max_window_layers",),  # all blocks have the window, or no block
    fixed=HAS_HEAD_NORMS,
    wrappers=(QWEN3_VL_MOE, QWEN3_OMNI),
)
