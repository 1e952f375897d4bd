"""Qwen3-MoE: a Qwen3 with a mixture of experts in some blocks; in all blocks if config.json does not name any."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import Experts, HfConfig
from megagrpo.models.families.dense import DENSE, QK_NORM, experts
from megagrpo.models.families.family import EXPERT_KEYS, Family, Raw, expert_problems, num_experts, windows
from megagrpo.models.families.qwen2 import window
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

_TABLE = DENSE | QK_NORM | experts("mlp", "gate_proj", "up_proj", "down_proj")


def _blocks(raw: Raw) -> frozenset[int]:
    dense, every = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step") or 1
    return frozenset(b for b in range(raw["num_hidden_layers"]) if b not in dense and (b + 1) % every == 0)


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    mixture = Experts(
        count=num_experts(raw),
        per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        normalized=raw.get("norm_topk_prob", False),
        blocks=_blocks(raw),
    )
    return replace(common, qk_norm=True, experts=mixture, windows=windows(raw, window(raw)))


def _problems(raw: Raw) -> list[str]:
    problems = expert_problems(raw, ("moe_intermediate_size",))
    if not problems and "num_hidden_layers" in raw and not _blocks(raw):
        problems.append(
            "model: mlp_only_layers and decoder_sparse_step leave no block with experts; a dense model is a qwen3"
        )
    return problems


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    keys=(
        *EXPERT_KEYS,
        *(
            "moe_intermediate_size",
            "norm_topk_prob",
            "mlp_only_layers",
            "decoder_sparse_step",
            "use_sliding_window",
            "sliding_window",
        ),
    ),
    ignored=("max_window_layers",),  # all blocks have the window, or no block
    fixed=HAS_HEAD_NORMS,
)
