"""The experts of Gemma 4 26B-A4B, which every block has beside its MLP. Imports no torch."""

from __future__ import annotations

from megagrpo.families.parts.llama_table import GATE_UP_DOWN, LAYER, MLP
from megagrpo.families.shared.architecture import Experts
from megagrpo.families.shared.blocks import gated, same, stacked
from megagrpo.families.shared.family import Raw, Table, expert_problems, mixture

_ENABLED, _COUNT, _TAKEN, _WIDTH = "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"
MIXTURE_KEYS = (_ENABLED, _COUNT, _TAKEN, _WIDTH)
_GATE, _UP, _DOWN = (f"{MLP}{name}.weight" for name in GATE_UP_DOWN)
_EXPERTS = LAYER + "experts."
MIXTURE: Table = {
    "mlp.router.weight": same(LAYER + "router.proj.weight"),
    "mlp.router.scale": same(LAYER + "router.scale"),
    "mlp.router.per_expert_scale": same(LAYER + "router.per_expert_scale"),
    "mlp.experts.linear_fc1.weight": stacked(gated(_EXPERTS + "gate_up_proj", _EXPERTS + "gate_up_proj")),
    "mlp.experts.linear_fc2.weight": stacked(same(_EXPERTS + "down_proj")),
    "mlp.shared_experts.linear_fc1.weight": gated(_GATE, _UP),
    "mlp.shared_experts.linear_fc2.weight": same(_DOWN),
    "mlp.norms.input.weight": same(LAYER + "pre_feedforward_layernorm_2.weight"),
    "mlp.norms.output.weight": same(LAYER + "post_feedforward_layernorm_2.weight"),
    "mlp.norms.shared_input.weight": same(LAYER + "pre_feedforward_layernorm.weight"),
    "mlp.norms.shared_output.weight": same(LAYER + "post_feedforward_layernorm_1.weight"),
    "mlp.norms.sum.weight": same(LAYER + "post_feedforward_layernorm.weight"),
}


def _usual(raw: Raw) -> Raw:
    """Return config.json with the usual name for the number of a token's experts."""
    return raw | dict(num_experts_per_tok=raw.get(_TAKEN))


def beside_mlp(raw: Raw) -> Experts | None:
    """Return the experts; None for a dense model."""
    if not raw.get(_ENABLED):
        return None
    return mixture(_usual(raw), intermediate_size=raw[_WIDTH], shared_size=raw["intermediate_size"], beside_mlp=True)


def mixture_problems(raw: Raw) -> list[str]:
    """Return why the experts cannot be trained."""
    if bool(raw.get(_ENABLED)) != (raw.get(_COUNT) is not None):
        said = f"{_ENABLED}={raw.get(_ENABLED)}, which transformers reads, and {_COUNT}={raw.get(_COUNT)}, which vLLM"
        return [f"{said} reads, disagree; set {_COUNT} to null in a copy of config.json if the model has no experts"]
    lines = expert_problems(_usual(raw), (_WIDTH,)) if raw.get(_ENABLED) else []
    return [line.replace("num_experts_per_tok", _TAKEN) for line in lines]
