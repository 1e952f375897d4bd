"""Traces a layer of experts as a GPU with Transformer Engine computes it: grouped products, and one wait for the token
counts."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megagrpo.policy.fp8.megatron_patches import token_dispatcher
from megagrpo.policy.specs import SequentialMLP
from megagrpo.proof.plan.tracing.counter import StepCounter, size_of

GRADIENT_BYTES = 4  # bytes per element of `main_grad`


def grouped_experts(counter: StepCounter) -> Any:
    """Return a patch of Megatron's `SequentialMLP` that computes the experts of a layer as two grouped products.

    The weight gradients are added to `main_grad` inside their product. Experts with biases stay sequential.
    """
    sequential = SequentialMLP.forward

    def forward(
        experts: SequentialMLP, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        if experts.config.add_bias_linear or experts.num_local_experts == 1:
            return sequential(experts, hidden, tokens_per_expert, probs)
        first = experts.local_experts[0]
        with contextlib.ExitStack() as stack:
            for name in ("linear_fc1", "linear_fc2"):
                weights = [getattr(expert, name).weight for expert in experts.local_experts]
                stack.enter_context(mock.patch.object(getattr(first, name), "forward", _product(weights, counter)))
            return first(hidden, probs)[0], None

    return mock.patch.object(SequentialMLP, "forward", forward)


def counts_on_host(counter: StepCounter) -> Any:
    """Return a patch of Megatron's dispatcher that moves the token counts to the host, as on a GPU: the host waits once
    per layer.

    The moved counts become tensors of the host, so no later use of them counts as a wait.
    """
    dispatcher_class = token_dispatcher.MoEAlltoAllTokenDispatcher
    synchronize = dispatcher_class._maybe_dtoh_and_synchronize

    def patched(dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        waits = counter.costs.waits.copy()
        moved = synchronize(dispatcher, point, tokens_per_expert)
        counter.costs.waits = waits  # drop the waits of a CPU, where each count is read separately
        if point == dispatcher.cuda_dtoh_point:
            moved = _of_the_host(moved)
            for name in (
                "input_splits",
                "output_splits",
                "output_splits_tp",
                "num_out_tokens",
                "num_global_tokens_per_local_expert",
            ):
                setattr(dispatcher, name, _of_the_host(getattr(dispatcher, name, None)))
        if point == dispatcher.cuda_sync_point:
            counter.wait()
        return moved

    return mock.patch.object(dispatcher_class, "_maybe_dtoh_and_synchronize", patched)


def _of_the_host(counts: Any) -> Any:
    """Return a copy that `HostWaits` takes for a tensor of the host; any other value unchanged."""
    if not isinstance(counts, Tensor):
        return counts
    with torch._C._DisableTorchDispatch():
        return counts.clone()


def _product(weights: list[Tensor], counter: StepCounter) -> Any:
    return lambda rows: (_Grouped.apply(rows, counter, *weights), None)


class _Grouped(torch.autograd.Function):
    """Rows [T, in], split evenly over the experts, times each expert's weight [out, in]. `main_grad` gets the weight
    gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counter: StepCounter, *weights: Tensor) -> Tensor:
        made = rows.new_empty(rows.shape[0], weights[0].shape[0])
        ctx.counter, ctx.out = counter, size_of(made)
        ctx.save_for_backward(rows, *weights)
        count(counter, rows, weights, size_of(made))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows, *weights = ctx.saved_tensors
        made = torch.empty_like(rows)
        count(ctx.counter, rows, weights, ctx.out)
        if weights[0].requires_grad:  # not with adapters, whose base weights are frozen
            count(ctx.counter, rows, weights, ctx.out, GRADIENT_BYTES * 2 / weights[0].element_size())
        return made, None, *[None] * len(weights)


def count(counter: StepCounter, rows: Tensor, weights: Any, out: int, weight_passes: float = 1) -> None:
    """Count the products of one direction, one launch per expert, which reads or writes the weights' bytes
    `weight_passes` times."""
    flops = 2 * rows.shape[0] * weights[0].numel()
    size = size_of(rows) + out + weight_passes * sum(map(size_of, weights))
    for _ in weights:
        counter.add("experts", flops / len(weights), size / len(weights))
