"""What Megatron's mixtures of experts are given after they are built."""

from __future__ import annotations

from typing import Any

from torch import nn

from megagrpo.families.config import HfConfig
from megagrpo.policy.balance import BalancedRouter
from megagrpo.policy.expert_groups import BestGroups

from megatron.core.transformer.transformer_layer import MoETransformerLayer  # isort: skip  (after megagrpo.policy.balance)


def prepare_experts(model: nn.Module, hf_config: HfConfig) -> None:
    """Routers that can balance and that keep the bias they choose by; and experts with gradient buffers and an optimizer of their own in
    every layout, so that all write the same checkpoint. Megatron gives them that only where their groups differ from those of other
    parameters. Where experts have biases, those of the second product are added once."""
    for layer in model.decoder.layers:
        if isinstance(layer, MoETransformerLayer):
            router, experts = layer.mlp.router, hf_config.experts
            router.__class__, router.frozen_expert_bias = BalancedRouter, True
            if experts.groups > 1:
                router.router_replay = BestGroups(experts.groups, experts.groups_per_token, best=2 if experts.bias else 1)
            for parameter in layer.mlp.experts.parameters():
                parameter.allreduce = False
                # Experts see all tokens that are sent to them: the gradient of a bias is not spread over tensor-parallel ranks.
                parameter.sequence_parallel = False
            if layer.mlp.config.add_bias_linear:
                _add_biases_once(layer.mlp.experts)


def _add_biases_once(experts: nn.Module) -> None:
    """The ranks that share an expert add up their parts of its output, each with the whole bias. Make those after the first add a zero that
    has the bias's gradient."""

    def nothing(module: nn.Module, inputs: Any, outputs: tuple) -> tuple:
        output, bias = outputs
        return output, [b - b.detach() for b in bias] if isinstance(bias, (list, tuple)) else bias - bias.detach()

    for name, module in experts.named_modules():
        if name.rpartition(".")[2] == "linear_fc2":
            # Also where there is one rank: after a sum over it, which hands its input on, Megatron cannot add the bias in place.
            module.explicit_expert_comm = True
            if experts.tp_group.rank() > 0:
                module.register_forward_hook(nothing)
