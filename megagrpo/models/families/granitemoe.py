"""Granite 3 with experts: a Granite with a mixture of experts in every block. Files hold the experts of a block as one
tensor per projection, gate rows above up rows. The weights of a token's experts sum to 1."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import gated, same, stacked
from megagrpo.models.families.dense import DENSE, LAYER
from megagrpo.models.families.family import EXPERT_KEYS, Family, Raw, Table, expert_problems, mixture
from megagrpo.models.families.granite import SCALES, scale_problems, scaled

_MOE = LAYER + "block_sparse_moe."
_IN, _OUT = _MOE + "input_linear.weight", _MOE + "output_linear.weight"
GRANITE_EXPERTS: Table = {
    "mlp.router.weight": same(_MOE + "router.layer.weight"),
    "mlp.experts.linear_fc1.weight": stacked(gated(_IN, _IN)),
    "mlp.experts.linear_fc2.weight": stacked(same(_OUT)),
}
_TABLE = {key: rule for key, rule in DENSE.items() if not key.startswith("mlp.")} | GRANITE_EXPERTS


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(scaled(raw, common), experts=mixture(raw), mixture_module="block_sparse_moe.")


FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=lambda raw: expert_problems(raw) + scale_problems(raw),
    keys=(*EXPERT_KEYS, *SCALES),
)
