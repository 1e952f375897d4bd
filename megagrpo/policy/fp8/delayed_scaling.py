"""Delayed scaling: FP8 scales follow largest magnitudes (amaxes) of earlier micro-batches. A step reads a tensor once.

A torch version with the bookkeeping of Transformer Engine 2.20 (`FP8GlobalStateManager`) under Megatron's HybridModel.
Scales of inputs and weights change at the end of the decoder's forward pass, if gradients are enabled. Scales of
gradients change at the end of its backward pass. Each change follows a max-reduction over the tensor-, data- and
context-parallel ranks of the stage, whose n-th linears share their scales. A pass without gradients changes no scale,
but its amaxes count in the next change. A weight keeps one scale for all micro-batches of a pass.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrpo.policy.fp8.fp8_settings import History
from megagrpo.policy.fp8.rounding import E4M3, scaled
from megagrpo.policy.layers.megatron_modules import decoder_of, mix_in

INPUT, WEIGHT, GRADIENT = range(3)


class DelayedScaling:
    """Scales [n, 3] float32 of n linears' input, weight and output gradient, set by history `amaxes` [length, n, 3].

    Row 0 of `amaxes` collects for the next change, of this rank only. The others hold earlier changes, oldest first.
    """

    def __init__(self, count: int, history: History, gradients: torch.dtype, group: dist.ProcessGroup):
        self.scale = torch.ones(count, 3)
        self.amaxes = torch.zeros(history.length, count, 3)
        self._history, self._group = history, group
        self._largest = torch.tensor([torch.finfo(dtype).max for dtype in (E4M3, E4M3, gradients)])
        self._forward, self._trains = False, False
        self._weight_scales: dict[int, Tensor] = {}
        self._recomputed: dict[int, deque[DelayedOperands]] = defaultdict(deque)
        self.gradients = gradients

    def begin(self) -> None:
        """Start a series of micro-batches with unrounded weights: drop cached weight scales and recompute queues."""
        self._weight_scales.clear()
        self._recomputed.clear()

    def run(self, stack: Callable[..., Tensor], hidden: Tensor, **options: Any) -> Tensor:
        """Run the decoder's forward pass `stack` on `hidden` [T, 1, H] and update the scales that depend on it."""
        self._forward, self._trains = True, torch.is_grad_enabled()
        if self._trains:
            hidden.requires_grad_()  # frozen embeddings (LoRA): the backward pass still ends with a gradient
            hidden.register_hook(lambda gradient: self.update([GRADIENT]))
        try:
            output = stack(**options)
        finally:
            self._forward = False
        if self._trains:
            self.update([INPUT, WEIGHT])
        return output

    def operands(self, index: int, x: Tensor, weight: Tensor) -> DelayedOperands:
        """Record the amaxes of x [..., in] and of the weight [out, in]. Return how linear `index` rounds them now."""
        # recompute in the backward pass: reuse the first pass's scales; its amaxes are already recorded
        if not self._forward:
            return self._recomputed[index].popleft()
        if index not in self._weight_scales:
            self.note(index, WEIGHT, weight)
            self._weight_scales[index] = self.scale[index, WEIGHT].clone()
        self.note(index, INPUT, x)
        operands = DelayedOperands(self, index, self.scale[index, INPUT].clone(), self._weight_scales[index])
        if self._trains and not torch.is_grad_enabled():
            self._recomputed[index].append(operands)
        return operands

    def note(self, index: int, what: int, x: Tensor) -> None:
        """Add the largest magnitude of x [...] to the amaxes of the coming change. As on a GPU, NaN is ignored.

        `what` is INPUT, WEIGHT or GRADIENT.
        """
        if x.numel():
            amax = x.detach().abs().amax().float().nan_to_num(nan=0.0, posinf=torch.inf)
            self.amaxes[0, index, what] = torch.maximum(self.amaxes[0, index, what], amax)

    @torch.no_grad()
    def update(self, columns: list[int]) -> None:
        """Update the scales of these columns (INPUT, WEIGHT, GRADIENT) from all amaxes so far.

        An amax of 0 or a non-finite one leaves its scale unchanged. Collective.
        """
        newest, h = self.amaxes[0, :, columns], self._history
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(newest, dist.ReduceOp.MAX, group=self._group)
        amaxes = self.amaxes[:, :, columns]
        amaxes[0] = newest
        amax = amaxes.amax(0) if h.algo == "max" else newest
        scale = (self._largest[columns] / amax / 2**h.margin).clamp(max=torch.finfo(torch.float32).max)
        self.scale[:, columns] = torch.where((amax > 0) & amax.isfinite(), scale, self.scale[:, columns])
        amaxes = amaxes.roll(-1, 0)  # the newest becomes the last row, the oldest row 0, which is cleared
        amaxes[0] = 0.0
        self.amaxes[:, :, columns] = amaxes


@dataclass(frozen=True)
class DelayedOperands:
    """Rounds the operands of a linear's forward product and of the two products of its backward pass.

    A whole tensor has one scale, so the dim over which a product sums does not matter.
    """

    scaling: DelayedScaling
    index: int
    input_scale: Tensor
    weight_scale: Tensor

    def input(self, x: Tensor, dim: int) -> Tensor:
        """Return x [rows, width] rounded to e4m3, float32."""
        return scaled(x, E4M3, self.input_scale)

    def weight(self, weight: Tensor, dim: int) -> Tensor:
        """Return the weight [rows, width] rounded to e4m3, float32."""
        return scaled(weight, E4M3, self.weight_scale)

    def gradient(self, grad: Tensor, dim: int) -> Tensor:
        """Record the amax of the gradient [rows, width], and return the gradient rounded, float32."""
        self.scaling.note(self.index, GRADIENT, grad)
        return scaled(grad, self.scaling.gradients, self.scaling.scale[self.index, GRADIENT])


@dataclass(frozen=True)
class Slot:
    """The entry `index` of a `DelayedScaling`, stored in the linear that it belongs to."""

    scaling: DelayedScaling
    index: int

    def operands(self, x: Tensor, weight: Tensor) -> DelayedOperands:
        """Return how the linear rounds x [..., in] and the weight [out, in] now."""
        return self.scaling.operands(self.index, x, weight)


def delay(
    chunks: Sequence[nn.Module],
    linears: Sequence[Any],
    history: History,
    gradients: torch.dtype,
    group: dist.ProcessGroup,
) -> None:
    """Give the linears of the bare chunks delayed scales, in one `DelayedScaling` for all."""
    scaling = DelayedScaling(len(linears), history, gradients, group)
    for index, linear in enumerate(linears):
        linear.fp8 = Slot(scaling, index)
    for chunk in chunks:
        decoder = decoder_of(chunk)
        decoder.scaling = scaling
        mix_in(decoder, DelayedStack)


def scaling_of(chunks: Sequence[nn.Module]) -> DelayedScaling | None:
    """Return the `DelayedScaling` that `delay` gave the chunks, or None."""
    return getattr(decoder_of(chunks[0]), "scaling", None)


class DelayedStack:
    """A decoder that runs its forward pass inside `DelayedScaling.run`."""

    scaling: DelayedScaling

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        """Return the decoder's output [T, 1, H]."""
        entering = hidden_states if self.pre_process else self.input_tensor
        stack = functools.partial(super().forward, hidden_states)  # type: ignore[misc]  # the decoder's
        return self.scaling.run(stack, entering, **options)
