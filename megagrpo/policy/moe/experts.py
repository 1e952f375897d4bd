"""Prepares the mixtures of experts of a built Megatron model: their routers, biases and gradient buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from torch import Tensor, nn

from megagrpo.families.hf_config import HfConfig
from megagrpo.policy.layers.megatron_modules import layers_of
from megagrpo.policy.moe.experts_beside_mlp import ScaledRouter
from megagrpo.policy.moe.router_losses import BalancedRouter


def prepare_experts(model: nn.Module, hf_config: HfConfig) -> None:
    """Prepare routers and experts: routers get load balancing and keep their selection bias frozen.

    Experts get gradient buffers and an optimizer of their own in every layout, so that every layout writes the same
    checkpoint. Megatron does this only where the experts' groups differ from those of other parameters. Biases of the
    experts' second linear are added once.
    """
    for layer in layers_of([model]):
        if isinstance(layer, MoETransformerLayer):
            router, experts = layer.mlp.router, hf_config.experts
            assert experts is not None, "a layer with experts in a model without"
            router.__class__, router.frozen_expert_bias = BalancedRouter, True
            if experts.beside_mlp:
                router.__class__ = ScaledRouter
                router.add_scales()
            if experts.groups > 1:
                router.router_replay = BestGroups(
                    experts.groups, experts.groups_per_token, best=2 if experts.bias else 1
                )
            if experts.softmax_bias:
                del router.expert_bias
                bias = torch.zeros(experts.count, dtype=torch.float32, device=torch.cuda.current_device())
                router.register_buffer("expert_bias", bias)
                router.router_replay = BiasedSoftmax(router)
            for parameter in layer.mlp.experts.parameters():
                parameter.allreduce = False
                # An expert gets every token that is routed to it: its bias gradient is not split over tensor-parallel
                # ranks.
                parameter.sequence_parallel = False
            if layer.mlp.config.add_bias_linear:
                _add_biases_once(layer.mlp.experts)


def _add_biases_once(experts: Any) -> None:
    """Make every rank but the first of an expert's tensor-parallel group add a zero in place of the bias.

    Ranks that share an expert sum parts of its output, each with the whole bias. The zero has the bias's gradient.
    """

    def zero_bias(module: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        output, bias = outputs
        return output, [b - b.detach() for b in bias] if isinstance(bias, (list, tuple)) else bias - bias.detach()

    for name, module in experts.named_modules():
        if name.rpartition(".")[2] == "linear_fc2":
            # Also set for one rank: the all-reduce over one rank returns its input, and Megatron cannot add the bias to
            # it in place.
            module.explicit_expert_comm = True
            if experts.tp_group.rank() > 0:
                module.register_forward_hook(zero_bias)


@dataclass(frozen=True)
class BiasedSoftmax:
    """Selects the experts with the highest sums of softmax score and `router.expert_bias`, through the same hook as
    `BestGroups`. The weights of the experts come from their logits alone (ERNIE 4.5)."""

    router: Any

    def get_replay_topk(self, logits: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """Return (logits, indices) [tokens, topk] of the selected experts, from logits [tokens, experts]."""
        scores = logits.detach().softmax(-1, dtype=torch.float32) + self.router.expert_bias
        indices = scores.topk(topk, dim=-1).indices
        return logits.gather(1, indices), indices


@dataclass(frozen=True)
class BestGroups:
    """Selects experts from the best groups of experts, through the hook that Megatron's router has for replayed routes
    (DeepSeek-V2, arXiv 2405.04434, section 2.1.3, and V3, arXiv 2412.19437).

    Experts form `count` groups of neighbours. A group's score is the sum of its `best` highest scores. The `taken`
    highest-scoring groups stay eligible. Megatron always sums as many scores as a token has experts in a group.
    """

    count: int
    taken: int
    best: int

    def get_replay_topk(self, scores: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
        """Return (scores, indices) [tokens, topk] of the selected experts, from scores [tokens, experts]."""
        grouped = scores.unflatten(-1, (self.count, -1))
        taken = grouped.topk(self.best, dim=-1).values.sum(-1).topk(self.taken, dim=-1, sorted=False).indices
        hidden = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, taken, False)
        return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(-2).topk(topk, dim=-1)
