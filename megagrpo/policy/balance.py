"""The load-balancing loss of mixtures of experts (Fedus et al. 2021, arXiv 2101.03961), over a whole step: the same in every layout.

With E experts of which each token takes k, over the N pairs of a counted token and a layer with experts: f_i is the number of times that
expert i was taken, divided by N, P_i the mean probability that routers give it, and the loss E * sum_i f_i P_i: k when all is even. It is
what transformers computes from one batch of the step's tokens. f is a constant to the gradient, so the loss is a sum over tokens once f is
known; `counting` is the forward pass that finds it. The tokens that count are those whose next token is in the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megagrpo.parallel.layout import Layout

from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # isort: skip  (after megagrpo.device, which prepares the platform)
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip


class BalancedRouter(TopKRouter):
    """TopKRouter that counts, inside `counting`, and adds the balancing loss's gradient once `slope` is set.

    `padding_mask` [tokens, 1] is true at tokens that do not count. Where tokens go does not depend on any of it.
    """

    counts: Tensor | None = None  # [2, E]: how often each expert was taken, and the sum of its probabilities
    slope: Tensor | None = None  # [E]: the loss's derivative by the probability of each expert at each token that counts

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routing_map = super().routing(logits, padding_mask)
        if padding_mask is None or (self.counts is None and self.slope is None):
            return probs, routing_map
        counted = ~padding_mask.reshape(-1)
        scores = logits.view(-1, logits.shape[-1]).softmax(-1, dtype=torch.float32)[counted]
        if self.counts is not None:
            self.counts += torch.stack([routing_map[counted].sum(0), scores.sum(0)])
        elif torch.is_grad_enabled():
            probs = MoEAuxLossAutoScaler.apply(probs, (scores @ self.slope).sum())
        return probs, routing_map


def routers(chunks: list[nn.Module]) -> list[BalancedRouter]:
    """The routers of this rank."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, BalancedRouter)]


@contextlib.contextmanager
def counting(chunks: list[nn.Module]) -> Iterator[None]:
    """Forward passes inside add to the counts of this rank's routers, which start at 0."""
    for router in routers(chunks):
        router.counts = torch.zeros(2, router.num_experts, dtype=torch.float64, device=router.weight.device)
    yield


def set_slopes(chunks: list[nn.Module], weight: float, layout: Layout) -> float:
    """Ends `counting`: the balancing loss of what was counted on all ranks; backward passes then add `weight` times its gradient.
    Collective."""
    held = routers(chunks)
    mine = sum((router.counts.cpu() for router in held), torch.zeros(()))
    taken, probability = sum(part for part in layout.all_gather_objects(mine) if part.dim())
    experts, pairs = len(taken), probability.sum().round().clamp(min=1)  # the probabilities of one token add up to 1
    for router in held:
        slope = weight * experts * taken / pairs**2
        router.counts, router.slope = None, slope.to(router.weight.device, torch.float32)
    return float(experts * (taken * probability).sum() / pairs**2)
