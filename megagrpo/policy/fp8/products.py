"""Linear layers whose products run in emulated FP8, without Transformer Engine.

The emulation rounds the operands of all three products of a linear: forward, gradient of the input, gradient of the
weight. It rounds to FP8 with the recipe's scales, as Transformer Engine 2.20 does, and accumulates in float32. It shows
the effect of FP8 on a model's numbers. It is slower than no FP8, and it takes the memory of dense numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor, nn

from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.fp8.masters import patch_optimizer
from megagrpo.policy.fp8.rounding import E4M3, round_to
from megagrpo.policy.fp8.tensor import Fp8Tensor, store_in_fp8
from megagrpo.policy.layers.megatron_modules import layers_of, mix_in


@dataclass(frozen=True)
class CurrentScaling:
    """Rounds the operands of a linear's products, each by scales of the current tensor."""

    fp8: Fp8

    def input(self, x: Tensor, dim: int) -> Tensor:
        """Return x [rows, width] rounded to e4m3, float32."""
        return self.round(x, E4M3, dim)

    def weight(self, weight: Tensor, dim: int) -> Tensor:
        """Return the weight [rows, width] rounded to e4m3, float32; the stored values if it is an Fp8Tensor."""
        return weight.values() if isinstance(weight, Fp8Tensor) else self.round(weight, E4M3, dim, square=True)

    def gradient(self, grad: Tensor, dim: int) -> Tensor:
        """Return the gradient [rows, width] rounded to the settings' dtype of gradients, float32."""
        return self.round(grad, self.fp8.gradients, dim)

    def round(self, x: Tensor, dtype: torch.dtype, dim: int, square: bool = False) -> Tensor:
        """Round x [rows, width] for a product that sums over `dim`; return float32. `square` is as in `Fp8.tile`."""
        return round_to(x, dtype, self.fp8.tile(x.shape, dim, square), power_of_two=self.fp8.powers_of_two)


def quantise_linears(chunks: Sequence[nn.Module], fp8: Fp8, layers_per_block: int) -> None:
    """Make linears of the bare chunks' decoder layers, experts included, multiply in emulated FP8 as the recipe says.

    With `fp8.keeps_weights` weights are rounded to FP8, else unchanged.
    """
    inside = [
        layer for layer in layers_of(chunks) if (layer.layer_number - 1) // layers_per_block not in fp8.bf16_layers
    ]
    linears: list[Any] = [
        m for layer in inside for m in layer.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))
    ]
    if fp8.keeps_weights:
        patch_optimizer()
    for linear in linears:
        linear.fp8 = CurrentScaling(fp8)
        mix_in(linear, Quantised)
        if fp8.keeps_weights:
            store_in_fp8(linear, fp8.tile(linear.weight.shape, dim=1, square=True), fp8.powers_of_two)


class Quantised:
    """A parallel linear whose products go through `fp8`.

    As in Transformer Engine, a rank's part of a tensor has its own scales. An input that sequence parallelism gathers
    has the scales of the whole.
    """

    fp8: CurrentScaling
    tp_group: torch.distributed.ProcessGroup

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, *, sequence_parallel: bool, **options: Any
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        output = Product.apply(input, weight, self.fp8, self.tp_group if options["allreduce_dgrad"] else None)
        return output if bias is None else output + bias


class Product(torch.autograd.Function):
    """x W^T of x [..., in] and W [out, in] in FP8; backward computes dy W, all-reduced over any `group`, and dy^T x.

    Each product rounds its operands for itself. Results have the dtypes of x and W.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, operands: CurrentScaling, group: torch.distributed.ProcessGroup | None
    ) -> Tensor:
        """Return the product [..., out]."""
        ctx.save_for_backward(x)
        # the weight stays in memory anyway and may be an Fp8Tensor
        ctx.weight, ctx.operands, ctx.group = weight, operands, group
        rounded = operands.input(x.flatten(0, -2), 1).view(x.shape)
        # no view, so that Megatron may add biases of experts in place
        return (rounded @ operands.weight(weight, 1).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Return the gradients of x [..., in] and, unless it is frozen, W [out, in] from that of the product."""
        (x,), weight, operands = ctx.saved_tensors, ctx.weight, ctx.operands
        inputs, grads = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = (operands.gradient(grads, 1) @ operands.weight(weight, 0)).to(x.dtype).view(x.shape)
        if ctx.group is not None:
            torch.distributed.all_reduce(grad_x, group=ctx.group)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None
        grad_weight = operands.gradient(grads, 0).t() @ operands.input(inputs, 0)
        return grad_x, grad_weight.to(weight.dtype), None, None
