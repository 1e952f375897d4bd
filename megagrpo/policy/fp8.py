"""Products in FP8: what Megatron is told where Transformer Engine multiplies, and the same numbers in torch where it cannot run.

The torch form rounds the operands of all three products of a linear (forward, gradient of the input, gradient of the weight) to what FP8
and the recipe's scales can hold, as Transformer Engine 2.20 does, and adds up in float32. It shows what FP8 does to a model's numbers; it
is slower than not using FP8, and its memory is that of dense numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megagrpo.config import ModelSection
from megagrpo.parallel import device
from megagrpo.policy.delayed_scaling import E4M3, E5M2, History, Operands, Slot, delay

from megatron.core import fp8_utils  # isort: skip  (after megagrpo.parallel, which prepares the platform)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region  # isort: skip
from megatron.core.transformer.moe import token_dispatcher  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

BLOCKS = {"tensorwise": None, "blockwise": 128, "mxfp8": 32}  # numbers along the sum of a product that share a scale; None: all
Tile = tuple[int, int]
_megatrons_recipe = fp8_utils.get_fp8_recipe


@dataclass(frozen=True)
class Fp8:
    """A recipe as `model.fp8_recipe` names it, whether gradients are e5m2 numbers, the decoder layers, from 0, that it leaves alone, and
    what the scales of `delayed` follow from; and whether routers send experts as many tokens as FP8 likes."""

    recipe: str
    hybrid: bool
    bf16_layers: frozenset[int] = frozenset()
    history: History | None = None
    pads_routing: bool = False

    @classmethod
    def of(cls, model: ModelSection, num_layers: int) -> Fp8 | None:
        """What the config asks of a model with so many decoder layers; None without FP8. ValueError for a layer that it does not have."""
        if model.fp8_recipe == "none":
            return None
        if wrong := [i for i in model.bf16_layers if not -num_layers <= i < num_layers]:
            raise ValueError(f"model.bf16_layers: {wrong[0]}, and the model has {num_layers} layers; use -{num_layers} to {num_layers - 1}")
        history = History(model.fp8_amax_history_len, model.fp8_amax_compute_algo, model.fp8_margin)
        bf16_layers = frozenset(i % num_layers for i in model.bf16_layers)
        padding = model.moe_router_padding_for_quantization
        return cls(model.fp8_recipe, model.hybrid_fp8, bf16_layers, history if model.fp8_recipe == "delayed" else None, padding)

    def megatron_config(self) -> dict[str, Any]:
        """The part of Megatron's configuration that says so to Transformer Engine; `keep_in_bf16` says the rest. Without Transformer Engine
        empty: `quantise_linears` is for that. ValueError when the GPU that is here cannot do it."""
        if problem := device.fp8_problem(self.recipe):
            raise ValueError(f"model.fp8_recipe: {self.recipe} does not run here: {problem}; choose none or another recipe")
        if not device.has_transformer_engine():
            return {}
        told = dict(fp8="hybrid" if self.hybrid else "e4m3", fp8_recipe=self.recipe)
        fp8_utils.get_fp8_recipe = _recipe
        told |= dict(moe_router_padding_for_quantization=True) if self.pads_routing else {}
        if h := self.history:
            told |= dict(fp8_amax_history_len=h.length, fp8_amax_compute_algo=h.algo, fp8_margin=h.margin)
        return told

    @property
    def gradients(self) -> torch.dtype:
        return E5M2 if self.hybrid else E4M3

    def operands(self, x: Tensor, weight: Tensor) -> Fp8:
        """How a linear rounds what it multiplies: by scales of what is there now."""
        return self

    def input(self, x: Tensor, dim: int) -> Tensor:
        return self.round(x, E4M3, dim)

    def weight(self, weight: Tensor, dim: int) -> Tensor:
        return self.round(weight, E4M3, dim, square=True)

    def gradient(self, grad: Tensor, dim: int) -> Tensor:
        return self.round(grad, self.gradients, dim)

    def round(self, x: Tensor, dtype: torch.dtype, dim: int, square: bool = False) -> Tensor:
        """x [rows, width] as an operand of a product that adds up over `dim`. Blocks of a weight are `square` where the recipe has such."""
        block = BLOCKS[self.recipe]
        if block is None:
            return round_to(x, dtype, tuple(x.shape))
        other = block if square and self.recipe == "blockwise" else 1
        return round_to(x, dtype, (block, other) if dim == 0 else (other, block), power_of_two=True)


def _recipe(config: TransformerConfig) -> Any:
    """Transformer Engine's recipe. Megatron's own delayed one passes arguments that Transformer Engine 2 has no more."""
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
    """Have Megatron enter no FP8 context for these of its layers, counted from 0 over all stages. Itself it knows only a number of first
    and one of last ones."""
    config.bf16_layers = frozenset(hybrid_layers)
    fp8_utils.is_first_last_bf16_layer = _in_bf16


def pad_routing(config: TransformerConfig, recipe: str) -> None:
    """Have Megatron's dispatcher send each expert a multiple of what the recipe multiplies, where its configuration says nothing of FP8."""
    config.moe_router_padding_for_quantization, config.routing_multiple = True, fp8_utils.get_fp8_align_size(recipe)
    token_dispatcher.get_align_size_for_quantization = _routing_multiple


def _routing_multiple(config: TransformerConfig) -> int:
    return config.routing_multiple


def leave_fp8(chunks: Sequence[nn.Module], fp8: Fp8, layers_per_block: int) -> None:
    """Take decoder layers of the bare chunks out of Transformer Engine's FP8 context, where Megatron enters one for all of them."""
    for layer in [layer for chunk in chunks for layer in chunk.decoder.layers]:
        if (layer.layer_number - 1) // layers_per_block in fp8.bf16_layers:
            layer.__class__ = _outside(type(layer))


@functools.cache
def _outside(layer: type) -> type:
    return type(f"Bf16{layer.__name__}", (OutsideFp8, layer), {})


class OutsideFp8:
    """A layer that computes as without FP8."""

    def forward(self, *args, **kwargs):
        from transformer_engine.pytorch import fp8_autocast

        with fp8_autocast(enabled=False):
            return super().forward(*args, **kwargs)


def _in_bf16(config: TransformerConfig, layer_no: int) -> bool:
    return layer_no in getattr(config, "bf16_layers", ())


def round_to(x: Tensor, dtype: torch.dtype, tile: Tile, power_of_two: bool = False) -> Tensor:
    """x [rows, width] in float32, each number replaced by what `dtype` holds of number x scale; a tile of numbers shares a scale.

    It maps the tile's largest magnitude to the largest number of the dtype, or to what the next lower `power_of_two` makes of it. Where all
    numbers are 0, and where the largest is not finite, it is 1.
    """
    rows, width = x.shape
    if not x.numel():
        return x.float()
    high, wide = (-(-size // by) * by for size, by in zip(x.shape, tile, strict=True))
    tiles = F.pad(x.float(), (0, wide - width, 0, high - rows)).view(high // tile[0], tile[0], wide // tile[1], tile[1])
    largest, most = tiles.abs().amax((1, 3), keepdim=True), torch.finfo(dtype).max
    scale = (most / largest).clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa 2^exponent, mantissa in [1/2, 1)
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    scale = torch.where(largest.isfinite() & (largest > 0), scale, 1.0)
    held = (tiles * scale).clamp(-most, most).to(dtype).float() / scale
    return held.view(high, wide)[:rows, :width]


def quantise_linears(chunks: Sequence[nn.Module], fp8: Fp8, layers_per_block: int, amax_group: torch.distributed.ProcessGroup) -> None:
    """Have the linears of the bare chunks' decoder layers, experts' among them, multiply as the recipe says. Weights are what they were.
    Ranks of `amax_group` share scales that follow what was met before."""
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    inside = [layer for layer in layers if (layer.layer_number - 1) // layers_per_block not in fp8.bf16_layers]
    linears = [m for layer in inside for m in layer.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
    for linear in linears:
        linear.fp8, linear.__class__ = fp8, _quantised(type(linear))
    if fp8.history is not None:
        delay(chunks, linears, fp8.history, fp8.gradients, amax_group)


@functools.cache
def _quantised(linear: type) -> type:
    return type(f"Fp8{linear.__name__}", (Quantised, linear), {})


class Quantised:
    """A parallel linear whose products are those of `fp8`. A rank's part of a tensor has scales of its own, except that what sequence
    parallelism gathers has those of the whole: both as in Transformer Engine."""

    fp8: Fp8 | Slot

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, sequence_parallel: bool, **options) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        operands = self.fp8.operands(input, weight)
        output = Product.apply(input, weight, operands, self.tp_group if options["allreduce_dgrad"] else None)
        return output if bias is None else output + bias


class Product(torch.autograd.Function):
    """x W^T of x [..., in] and W [out, in] in FP8, and in the backward pass dy W, summed over `group` if there is one, and dy^T x; each of
    operands that are rounded for it. Results have the dtypes of x and W."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, fp8: Fp8 | Operands, group: torch.distributed.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fp8, ctx.group = fp8, group
        product = fp8.input(x.flatten(0, -2), 1) @ fp8.weight(weight, 1).t()
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x, weight), fp8 = ctx.saved_tensors, ctx.fp8
        inputs, grads = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = (fp8.gradient(grads, 1) @ fp8.weight(weight, 0)).to(x.dtype).view(x.shape)
        if ctx.group is not None:
            torch.distributed.all_reduce(grad_x, group=ctx.group)
        grad_weight = fp8.gradient(grads, 0).t() @ fp8.input(inputs, 0)
        return grad_x, grad_weight.to(weight.dtype), None, None
