"""The balancing loss of routers over a step, equal in every layout (Fedus et al. 2021, arXiv 2101.03961), and updates
of selection biases (Wang et al. 2024, arXiv 2408.15664).

A model has E experts, and each token takes k. N counts the pairs of a counted token and a layer with experts. f_i is
the number of times that expert i was taken, divided by N. P_i is the mean router probability of expert i. The loss is E
* sum_i f_i P_i, which is k when the load is even. transformers computes the same loss from one batch of the step's
tokens.

f is a constant to the gradient. The loss is therefore a sum over tokens once f is known, and a forward pass over the
step finds f.

An expert's selection bias moves by a constant rate after an optimizer step, towards the mean load of its layer. The
load is the number of counted tokens that took the expert in the backward passes of the step, replayed routes included.

A token counts if its next token is in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.config import AlgorithmSection
from megagrpo.platform.parallel.layout import Layout
from megagrpo.train_types import Metric


class BalancedRouter(TopKRouter):
    """A TopKRouter that counts the load once it has `counts`, and adds the gradient of the balancing loss once `slope`
    is set.

    `padding_mask` [tokens, 1] bool is True at tokens that do not count. Routing depends on neither mask nor counts.
    """

    counts: Tensor | None = None  # [2, E] float64: how often each expert was taken, and the sum of its probabilities
    slope: Tensor | None = None  # [E] float32: derivative of the loss by an expert's probability at any counted token
    loads: Tensor | None = None  # [E] int64: how many of the step's counted tokens took each expert

    mask: Tensor | None = None  # `padding_mask` of a forward pass that does not pass it on

    @contextmanager
    def masking(self, padding_mask: Tensor | None) -> Iterator[None]:
        """Context manager of a forward pass in which this mask is not an argument."""
        self.mask = padding_mask
        try:
            yield
        finally:
            self.mask = None

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Add the tokens that count to the loads, from the map [tokens, E] and mask [tokens]."""
        if self.loads is not None and padding_mask is not None and torch.is_grad_enabled():
            self.loads += (routing_map & ~padding_mask[:, None]).sum(0)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (probabilities, routing map), both [tokens, E], from logits [tokens, 1, E], as TopKRouter does."""
        padding_mask = self.mask if padding_mask is None else padding_mask
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


def selection_biases(chunks: list[nn.Module]) -> list[Tensor]:
    """Return the biases [E] float32 with which this rank's routers choose experts; empty for families without any."""
    return [router.expert_bias for router in routers(chunks) if router.expert_bias is not None]


def freeze_routers(chunks: list[nn.Module]) -> None:
    """Leave the weights and biases of this rank's routers out of training. Call it before gradient buffers exist."""
    for router in routers(chunks):
        router.requires_grad_(False)


class RouterTerms:
    """What the routers of this rank's bare chunks compute over an optimizer step. All methods are collective."""

    def __init__(self, chunks: list[nn.Module], algorithm: AlgorithmSection, layout: Layout):
        self._chunks, self._algorithm, self._layout = chunks, algorithm, layout
        self._routers = routers(chunks)
        self.metrics: dict[str, Metric] = {}  # of the step in progress

    def begin(self, forward: Callable[[], None]) -> None:
        """Prepare the routers for the backward passes of a step. `forward` runs all micro-batches forward, for the
        balancing loss."""
        self.metrics = {}
        for router in self._routers if self._algorithm.moe_router_bias_update_rate else ():
            router.loads = torch.zeros(router.num_experts, dtype=torch.int64, device=router.weight.device)
        if self._algorithm.router_aux_loss_coef:
            self.metrics["aux_loss"] = Metric(self._balance(forward))

    def _balance(self, forward: Callable[[], None]) -> float:
        """Return the balancing loss of the tokens counted on all ranks. Later backward passes add its gradient."""
        for router in self._routers:
            router.counts = torch.zeros(2, router.num_experts, dtype=torch.float64, device=router.weight.device)
        with torch.no_grad():
            forward()
        experts = unwrap_model(self._chunks[0]).config.num_moe_experts
        counts = torch.zeros(2, experts, dtype=torch.float64)  # a stage may have no layer with experts
        for router in self._routers:
            counts += router.counts.cpu() if router.counts is not None else 0
        taken, probability = self._layout.all_reduce(counts)
        pairs = probability.sum().round().clamp(min=1)  # the probabilities of one token add up to 1
        for router in self._routers:
            slope = self._algorithm.router_aux_loss_coef * experts * taken / pairs**2
            router.counts, router.slope = None, slope.to(router.weight.device, torch.float32)
        return float(experts * (taken * probability).sum() / pairs**2)

    @torch.no_grad()
    def update_biases(self) -> None:
        """Move the selection biases by the loads of the step's backward passes."""
        loads = [router.loads for router in self._routers if router.loads is not None]
        if not loads:  # no rank of this pipeline stage has any
            return
        total = torch.stack(loads)
        dist.all_reduce(total, group=self._layout.process_groups.tp_dp_cp)
        for router, load in zip(self._routers, total, strict=True):
            sign = torch.sign(load.sum() - router.num_experts * load)  # mean load - load, in whole numbers
            router.expert_bias += self._algorithm.moe_router_bias_update_rate * sign
            router.loads = None
