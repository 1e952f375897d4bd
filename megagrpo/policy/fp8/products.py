"""Linear layers in FP8: Megatron's settings where Transformer Engine runs, and an emulation in torch where it does not.

The emulation rounds the operands of all three products of a linear: forward, gradient of the input, gradient of the weight. It rounds to
FP8 with the recipe's scales, as Transformer Engine 2.20 does, and accumulates in float32. It shows the effect of FP8 on a model's
numbers. It is slower than no FP8, and it takes the memory of dense numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megagrpo import device
from megagrpo.config import ModelSection
from megagrpo.policy.fp8.delayed_scaling import History, Operands, Slot, delay
from megagrpo.policy.fp8.rounding import E4M3, E5M2, Tile, round_to
from megagrpo.policy.fp8.weights import Fp8Tensor, hold_in_fp8

BLOCKS = {"tensorwise": None, "blockwise": 128, "mxfp8": 32}  # elements along the summed dim that share a scale; None: all
_megatrons_recipe = fp8_utils.get_fp8_recipe


@dataclass(frozen=True)
class Fp8:
    """The FP8 settings of a model.

    `recipe` is as in `model.fp8_recipe`. `hybrid`: gradients are e5m2. `bf16_layers`: decoder layers, from 0, without FP8. `history`:
    how the scales of recipe `delayed` follow earlier amaxes. `pads_routing`: routers pad each expert's tokens to the multiple that FP8
    needs. `keeps_weights`: weights stay in FP8 between steps.
    """

    recipe: str
    hybrid: bool
    bf16_layers: frozenset[int] = frozenset()
    history: History | None = None
    pads_routing: bool = False
    keeps_weights: bool = False

    @classmethod
    def of(cls, model: ModelSection, num_layers: int) -> Fp8 | None:
        """Return the config's FP8 settings for a model with `num_layers` decoder layers; None without FP8.

        Raises ValueError for a layer that the model does not have.
        """
        if model.fp8_recipe == "none":
            return None
        if wrong := [i for i in model.bf16_layers if not -num_layers <= i < num_layers]:
            said = f"{wrong[0]} is out of range: the model has {num_layers} layers; use -{num_layers} to {num_layers - 1}"
            raise ValueError(f"model.bf16_layers: {said}")
        history = History(model.fp8_amax_history_len, model.fp8_amax_compute_algo, model.fp8_margin)
        bf16_layers = frozenset(i % num_layers for i in model.bf16_layers)
        return cls(
            model.fp8_recipe,
            model.hybrid_fp8,
            bf16_layers,
            history if model.fp8_recipe == "delayed" else None,
            model.moe_router_padding_for_quantization,
            model.fp8_param,
        )

    def megatron_config(self) -> dict[str, Any]:
        """Return the fields of Megatron's configuration that select this recipe in Transformer Engine; `keep_in_bf16` sets the rest.

        Without Transformer Engine it is empty, and `quantise_linears` emulates the recipe. Raises ValueError when this GPU does not
        support the recipe.
        """
        if problem := device.fp8_problem(self.recipe):
            raise ValueError(f"model.fp8_recipe: {self.recipe} does not run here: {problem}; choose none or another recipe")
        if not device.has_transformer_engine():
            return {}
        told = dict(fp8="hybrid" if self.hybrid else "e4m3", fp8_recipe=self.recipe)
        fp8_utils.get_fp8_recipe = _recipe
        told |= dict(moe_router_padding_for_quantization=True) if self.pads_routing else {}
        told |= dict(fp8_param=True) if self.keeps_weights else {}
        if h := self.history:
            told |= dict(fp8_amax_history_len=h.length, fp8_amax_compute_algo=h.algo, fp8_margin=h.margin)
        return told

    @property
    def gradients(self) -> torch.dtype:
        """The FP8 dtype of gradients."""
        return E5M2 if self.hybrid else E4M3

    def operands(self, x: Tensor, weight: Tensor) -> Fp8:
        """Return how a linear rounds its operands: here by scales of the current tensors."""
        return self

    def input(self, x: Tensor, dim: int) -> Tensor:
        """Return x [rows, width] rounded to e4m3, float32."""
        return self.round(x, E4M3, dim)

    def weight(self, weight: Tensor, dim: int) -> Tensor:
        """Return the weight [rows, width] rounded to e4m3, float32; the stored values if it is an Fp8Tensor."""
        return weight.values() if isinstance(weight, Fp8Tensor) else self.round(weight, E4M3, dim, square=True)

    def gradient(self, grad: Tensor, dim: int) -> Tensor:
        """Return the gradient [rows, width] rounded to `gradients`, float32."""
        return self.round(grad, self.gradients, dim)

    def round(self, x: Tensor, dtype: torch.dtype, dim: int, square: bool = False) -> Tensor:
        """Round x [rows, width] for a product that sums over `dim`; return float32. `square`: a weight, whose blocks are square in
        recipe `blockwise`."""
        return round_to(x, dtype, self.tile(x.shape, dim, square), power_of_two=self.powers_of_two)

    def tile(self, shape: torch.Size, dim: int, square: bool = False) -> Tile:
        """Return the (rows, columns) of a matrix that share a scale in a product that sums over `dim`."""
        block = BLOCKS[self.recipe]
        if block is None:
            return tuple(shape)
        other = block if square and self.recipe == "blockwise" else 1
        return (block, other) if dim == 0 else (other, block)

    @property
    def powers_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return BLOCKS[self.recipe] is not None


def _recipe(config: TransformerConfig) -> Any:
    """Return Transformer Engine's recipe. Megatron's own version for `delayed` passes arguments that Transformer Engine 2 no longer
    accepts."""
    if config.fp8_recipe != "delayed":
        return _megatrons_recipe(config)
    from transformer_engine.common.recipe import DelayedScaling, Format

    return DelayedScaling(
        margin=config.fp8_margin,
        fp8_format=Format.HYBRID if config.fp8 == "hybrid" else Format.E4M3,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )


def keep_in_bf16(config: TransformerConfig, hybrid_layers: Iterable[int]) -> None:
    """Make Megatron skip the FP8 context for these hybrid layers, counted from 0 over all stages.

    Megatron itself only supports a number of first and of last layers.
    """
    config.bf16_layers = frozenset(hybrid_layers)
    fp8_utils.is_first_last_bf16_layer = _in_bf16


def pad_routing(config: TransformerConfig, recipe: str) -> None:
    """Make Megatron's dispatcher pad each expert's tokens to the recipe's multiple when Megatron's configuration does not enable FP8."""
    config.moe_router_padding_for_quantization, config.routing_multiple = True, fp8_utils.get_fp8_align_size(recipe)
    token_dispatcher.get_align_size_for_quantization = _routing_multiple


def _routing_multiple(config: TransformerConfig) -> int:
    return config.routing_multiple


def leave_fp8(chunks: Sequence[nn.Module], fp8: Fp8, layers_per_block: int) -> None:
    """Disable FP8 in the decoder layers `fp8.bf16_layers` of the bare chunks. Megatron enters one Transformer Engine FP8 context for all
    layers."""
    for layer in [layer for chunk in chunks for layer in chunk.decoder.layers]:
        if (layer.layer_number - 1) // layers_per_block in fp8.bf16_layers:
            layer.__class__ = _outside(type(layer))


@functools.cache
def _outside(layer: type) -> type:
    return type(f"Bf16{layer.__name__}", (OutsideFp8, layer), {})


class OutsideFp8:
    """A layer that runs outside Transformer Engine's FP8 context."""

    def forward(self, *args, **kwargs):
        from transformer_engine.pytorch import fp8_autocast

        with fp8_autocast(enabled=False):
            return super().forward(*args, **kwargs)


def _in_bf16(config: TransformerConfig, layer_no: int) -> bool:
    return layer_no in getattr(config, "bf16_layers", ())


def quantise_linears(chunks: Sequence[nn.Module], fp8: Fp8, layers_per_block: int, amax_group: torch.distributed.ProcessGroup) -> None:
    """Make the linears of the bare chunks' decoder layers, experts included, multiply in emulated FP8 as the recipe says.

    Weights keep their values, or are rounded to FP8 with `fp8.keeps_weights`. The ranks of `amax_group` share delayed scales.
    """
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    inside = [layer for layer in layers if (layer.layer_number - 1) // layers_per_block not in fp8.bf16_layers]
    linears = [m for layer in inside for m in layer.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
    for linear in linears:
        linear.fp8, linear.__class__ = fp8, _quantised(type(linear))
        if fp8.keeps_weights:
            hold_in_fp8(linear, fp8.tile(linear.weight.shape, dim=1, square=True), fp8.powers_of_two)
    if fp8.history is not None:
        delay(chunks, linears, fp8.history, fp8.gradients, amax_group)


@functools.cache
def _quantised(linear: type) -> type:
    return type(f"Fp8{linear.__name__}", (Quantised, linear), {})


class Quantised:
    """A parallel linear whose products go through `fp8`.

    As in Transformer Engine, a rank's part of a tensor has its own scales. An input that sequence parallelism gathers has the scales of
    the whole.
    """

    fp8: Fp8 | Slot

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, sequence_parallel: bool, **options) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        operands = self.fp8.operands(input, weight)
        output = Product.apply(input, weight, operands, self.tp_group if options["allreduce_dgrad"] else None)
        return output if bias is None else output + bias


class Product(torch.autograd.Function):
    """x W^T of x [..., in] and W [out, in] in FP8; the backward pass computes dy W, all-reduced over `group` if given, and dy^T x.

    Each product rounds its operands for itself. Results have the dtypes of x and W.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, fp8: Fp8 | Operands, group: torch.distributed.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.fp8, ctx.group = weight, fp8, group  # the weight stays in memory anyway and may be an Fp8Tensor
        product = fp8.input(x.flatten(0, -2), 1) @ fp8.weight(weight, 1).t()
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,), weight, fp8 = ctx.saved_tensors, ctx.weight, ctx.fp8
        inputs, grads = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = (fp8.gradient(grads, 1) @ fp8.weight(weight, 0)).to(x.dtype).view(x.shape)
        if ctx.group is not None:
            torch.distributed.all_reduce(grad_x, group=ctx.group)
        grad_weight = fp8.gradient(grads, 0).t() @ fp8.input(inputs, 0)
        return grad_x, grad_weight.to(weight.dtype), None, None
