"""Experts beside an MLP, as in Gemma 4: each has norms of its own on input and output, and their sum has another. The
MLP is Megatron's shared expert. The router has a norm, factors on its input, and a factor per expert."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megagrpo.policy.attention.head_norms import UnitNorm
from megagrpo.policy.moe.router_losses import BalancedRouter

_NORMS = ("input", "output", "shared_input", "shared_output", "sum")


@functools.cache
def beside_mlp(norm: Any) -> Any:
    """Return a subclass of Megatron's MoELayer with norms of the class `norm`. Its input is not normalised yet."""

    class BesideMlp(MoELayer):
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            sizes = dict(hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            self.norms = nn.ModuleDict({name: norm(config=config, **sizes) for name in _NORMS})

        def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
            """Return the output [T, 1, H] of the MLP."""
            output: Tensor = super().shared_experts_compute(self.norms["shared_input"](hidden_states))
            return self.norms["shared_output"](output)

        def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
            """Return what the dispatcher sends to the experts, from the input [T, 1, H] that the router has seen."""
            return super().preprocess(self.norms["input"](hidden_states), probs, routing_map)

        def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
            """Return the normed sum [T, 1, H] of the outputs of experts and MLP."""
            routed: Tensor = super().postprocess(output, None)
            return self.norms["sum"](shared_expert_output + self.norms["output"](routed))

    return BesideMlp


class ScaledRouter(BalancedRouter):
    """A router whose input is divided by its root mean square and multiplied by `scale` [H] / sqrt(H). The weights of a
    token's experts, which sum to 1, are then multiplied by `per_expert_scale` [E]."""

    scale: nn.Parameter
    per_expert_scale: nn.Parameter

    def add_scales(self) -> None:
        """Create the factors, as 1."""
        config: Any = self.config
        for name, size in (("scale", config.hidden_size), ("per_expert_scale", config.num_moe_experts)):
            ones = torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
            factors: Any = nn.Parameter(ones)
            factors.sequence_parallel = config.sequence_parallel  # each tensor-parallel rank sees a part of the tokens
            self.register_parameter(name, factors)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (weights, routing map), both [T, E], of the input [T, 1, H]."""
        normed = UnitNorm(self.config.layernorm_epsilon).normalise(input)
        return super().forward(normed * self.scale * self.config.hidden_size**-0.5, padding_mask)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (weights, routing map), both [tokens, E], from logits [tokens, 1, E]."""
        probs, routing_map = super().routing(logits, padding_mask)
        return probs * self.per_expert_scale, routing_map
