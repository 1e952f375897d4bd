"""Load-balancing loss of mixtures of experts (Fedus et al. 2021, arXiv 2101.03961) over a step, equal in every layout.

A model has E experts, and each token takes k. N counts the pairs of a counted token and a layer with experts. f_i is
the number of times that expert i was taken, divided by N. P_i is the mean router probability of expert i. The loss is E
* sum_i f_i P_i, which is k when the load is even. transformers computes the same loss from one batch of the step's
tokens.

f is a constant to the gradient. The loss is therefore a sum over tokens once f is known, and the forward pass inside
`counting` finds f.
A token counts if its next token is in the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.platform.parallel.layout import Layout


class BalancedRouter(TopKRouter):
    """A TopKRouter that counts the load inside `counting` and adds the balancing loss's gradient once `slope` is set.

    `padding_mask` [tokens, 1] bool is True at tokens that do not count. Routing depends on neither mask nor counts.
    """

    counts: Tensor | None = None  # [2, E] float64: how often each expert was taken, and the sum of its probabilities
    slope: Tensor | None = None  # [E] float32: derivative of the loss by an expert's probability at any counted token

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (probabilities, routing map), both [tokens, E], from logits [tokens, 1, E], as TopKRouter does."""
        probs, routing_map = super().routing(logits, padding_mask)
        if padding_mask is None or (self.counts is None and self.slope is None):
            return probs, routing_map
        counted = ~padding_mask.reshape(-1)
        # Zeros in place of a selection: selecting rows by a mask makes a GPU's host wait for their number.
        scores = torch.where(counted[:, None], logits.view(-1, logits.shape[-1]).softmax(-1, dtype=torch.float32), 0.0)
        if self.counts is not None:
            self.counts += torch.stack([(routing_map & counted[:, None]).sum(0), scores.sum(0)])
        elif self.slope is not None and torch.is_grad_enabled():
            probs = MoEAuxLossAutoScaler.apply(probs, (scores @ self.slope).sum())
        return probs, routing_map


def routers(chunks: list[nn.Module]) -> list[BalancedRouter]:
    """Return the routers of this rank's bare chunks."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, BalancedRouter)]


@contextlib.contextmanager
def counting(chunks: list[nn.Module]) -> Iterator[None]:
    """Context manager: forward passes inside it add to the counts of this rank's routers. The counts start at 0."""
    for router in routers(chunks):
        router.counts = torch.zeros(2, router.num_experts, dtype=torch.float64, device=router.weight.device)
    yield


def set_slopes(chunks: list[nn.Module], weight: float, layout: Layout) -> float:
    """End `counting` and return the balancing loss of the tokens counted on all ranks. Later backward passes add
    `weight` times its gradient. Collective."""
    local = routers(chunks)
    experts = unwrap_model(chunks[0]).config.num_moe_experts
    counts = torch.zeros(2, experts, dtype=torch.float64)  # a stage may have no layer with experts
    for router in local:
        counts += router.counts.cpu() if router.counts is not None else 0
    taken, probability = layout.all_reduce(counts)
    pairs = probability.sum().round().clamp(min=1)  # the probabilities of one token add up to 1
    for router in local:
        slope = weight * experts * taken / pairs**2
        router.counts, router.slope = None, slope.to(router.weight.device, torch.float32)
    return float(experts * (taken * probability).sum() / pairs**2)
