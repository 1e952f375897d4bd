"""Weights that are FP8 numbers and scales (`model.fp8_param`), and nothing else between two steps: how the rest of the house reads and
writes them, Transformer Engine's or, without it, `Fp8Tensor`s.

Megatron's sharded optimizer rounds float32 masters to them in each step, and its ranks gather bytes. A product takes the same numbers as
without `model.fp8_param`, where weights are bf16 and are rounded for each product, so both take the same steps, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import megagrpo.device  # noqa: F401  (prepares the platform before megatron is imported)
from megagrpo.policy.fp8.rounding import E4M3, Tile, codes, largest, scale_for, tiled, untiled

from megatron.core import fp8_utils  # isort: skip


class Fp8Tensor(torch.Tensor):
    """A matrix as e4m3 `numbers` [rows, width] uint8 and float32 `scales` [tiles down, tiles across] that they were multiplied by. To
    others it is of `dtype`: what is computed from it is computed from `dequantize()`, and `copy_` rounds what it is given.

    Its counterparts are Transformer Engine's Float8Tensor and Float8BlockwiseQTensor, which need a GPU.
    """

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, tile: Tile, power_of_two: bool, dtype: torch.dtype) -> Fp8Tensor:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)
        made.numbers, made.scales, made.tile, made.power_of_two = numbers, scales, tile, power_of_two
        return made

    @classmethod
    def of(cls, dense: Tensor, tile: Tile, power_of_two: bool) -> Fp8Tensor:
        """The nearest to `dense` [rows, width], whose dtype it has; each tile's largest magnitude becomes the largest e4m3 number, or what
        the next lower power of two makes of it."""
        down, across = (-(-size // by) for size, by in zip(dense.shape, tile, strict=True))
        numbers, scales = dense.new_empty(dense.shape, dtype=torch.uint8), dense.new_empty(down, across, dtype=torch.float32)
        made = cls(numbers, scales, tile, power_of_two, dense.dtype)
        made.round(dense)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Names of the tensors that it is made of, as torch and Transformer Engine have it."""
        return ["numbers", "scales"], (self.tile, self.power_of_two, self.dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def values(self) -> Tensor:
        """[rows, width] float32."""
        return untiled(tiled(self.numbers, self.tile).view(E4M3).float() / self.scales[:, None, :, None], self.shape)

    def dequantize(self) -> Tensor:
        """[rows, width] in `dtype`."""
        return self.values().to(self.dtype)

    def round(self, dense: Tensor) -> None:
        """Become the nearest to `dense`."""
        tiles = tiled(dense, self.tile)
        self.scales.copy_(scale_for(largest(tiles), E4M3, self.power_of_two))
        self.put(tiles)

    # Megatron calls `dequantize` so where there is no Transformer Engine.
    from_float8 = dequantize

    def put(self, tiles: Tensor, part: slice = slice(None)) -> None:
        """Take over `part` of the numbers, row after row, from tiles of the whole by the scales that are there."""
        found = untiled(codes(tiles, E4M3, self.scales[:, None, :, None]).view(torch.uint8), self.shape)
        self.numbers.view(-1)[part].copy_(found.reshape(-1)[part])

    @property
    def data(self) -> Fp8Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Fp8Tensor) -> None:
        """Consist of what another one does."""
        self.numbers, self.scales = other.numbers, other.scales

    __torch_function__ = torch._C._disabled_torch_function_impl  # what is computed from one is a plain tensor

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        of = args[0]
        if operation is torch.ops.aten.detach.default:
            return cls(of.numbers, of.scales, of.tile, of.power_of_two, of.dtype)
        if operation is torch.ops.aten.copy_.default and isinstance(of, cls):
            of.round(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            return of
        if operation._schema.is_mutable and isinstance(of, cls):
            raise TypeError(f"{operation} would change a weight in FP8; write() what it becomes")
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return operation(*args, **kwargs)


class DenseWeight:
    """A weight in FP8 for who cuts tensors to pieces: the parameter itself, but that `data` and `detach()` are a dense copy in its dtype,
    made anew each time, and `store` takes another."""

    def __init__(self, weight: Tensor):
        self.weight = weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight, name)

    @property
    def data(self) -> Tensor:
        return dense(self.weight)

    def detach(self) -> Tensor:
        return dense(self.weight)

    def store(self, values: Tensor) -> None:
        write(self.weight, values)


def is_fp8(weight: Tensor) -> bool:
    """Whether it is FP8 numbers and scales, here or on a GPU."""
    return fp8_utils.is_float8tensor(weight)


def dense(weight: Tensor) -> Tensor:
    """The numbers that a weight stands for, in its dtype and without gradient: its own memory, where it is a plain tensor."""
    return weight.detach().dequantize() if is_fp8(weight) else weight.detach()


def parts(weight: Tensor) -> list[Tensor]:
    """The plain tensors that a weight is made of now: itself, where it is one."""
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]] if is_fp8(weight) else [weight]


def copied(weight: Tensor) -> Tensor:
    """A copy of a weight as it is now, without gradient, of tensors of its own: a clone of Transformer Engine's shares its scale."""
    if not is_fp8(weight):
        return weight.detach().clone()
    made = weight.detach()
    for name in made.__tensor_flatten__()[0]:
        setattr(made, name, getattr(made, name).clone())
    return made


@torch.no_grad()
def write(weight: Tensor, values: Tensor) -> None:
    """Replace what a weight stands for. One in FP8 becomes the nearest that there is, and remembers `values`."""
    weight.copy_(values)
    if is_fp8(weight):
        remember(weight, values)


def remember(weight: Tensor, values: Tensor) -> None:
    """Keep what a weight in FP8 was rounded from in the host's memory: its master is not to begin with less."""
    weight.unrounded = values.detach().to(weight.dtype).cpu()


def unrounded(weight: Tensor) -> Tensor | None:
    """What was last written to a weight in FP8, if that was after `forget_unrounded`."""
    return weight.__dict__.get("unrounded")


def forget_unrounded(chunks: Sequence[nn.Module]) -> None:
    """The masters of the chunks' weights have begun with what was written."""
    for weight in (weight for chunk in chunks for weight in chunk.parameters()):
        weight.__dict__.pop("unrounded", None)


def hold_in_fp8(linear: nn.Module, tile: Tile, power_of_two: bool) -> None:
    """Make the weight of a linear an `Fp8Tensor`."""
    _show_megatron()
    rounded = nn.Parameter(Fp8Tensor.of(linear.weight.detach(), tile, power_of_two))
    rounded.__dict__.update(linear.weight.__dict__)  # Megatron's marks
    linear.weight = rounded


def _show_megatron() -> None:
    """Have Megatron take an `Fp8Tensor` for what Transformer Engine would make. It names what a rank needs for that in one module."""
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS, fp8_utils.FP8_TENSOR_CLASS = True, Fp8Tensor
    fp8_utils._modify_underlying_storage_impl = _move_numbers
    fp8_utils._quantize_param_shard_impl = _round_masters


def _move_numbers(weight: Fp8Tensor, place: Tensor) -> None:
    place.copy_(weight.numbers)
    weight.numbers = place


def _round_masters(
    weights: Sequence[Fp8Tensor], masters: Sequence[Tensor | None], starts: Sequence[int | None], group: dist.ProcessGroup, *others: None
) -> None:
    """Round this rank's part of each weight's float32 master, from element `start` on, to its part of the numbers; None where it has no
    part. Collective over `group`, whose ranks have all parts: scales are those of whole weights, of masters in the weights' dtype, as in
    Transformer Engine 2.20 (`quantize_master_weights`)."""
    if not weights:
        return
    own = list(zip(weights, masters, starts, strict=True))
    # NaN has no place in a maximum over ranks, and leaves the scale as infinity does.
    magnitudes = [largest(_in_place(*each)).nan_to_num(nan=torch.inf) for each in own]
    joined = torch.cat([each.flatten() for each in magnitudes])
    dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
    for (weight, master, start), most in zip(own, joined.split([each.numel() for each in magnitudes]), strict=True):
        weight.scales.copy_(scale_for(most.view(weight.scales.shape), E4M3, weight.power_of_two))
        if master is not None:
            weight.put(_in_place(weight, master, start), slice(start, start + master.numel()))


def _in_place(weight: Fp8Tensor, master: Tensor | None, start: int | None) -> Tensor:
    """The tiles of a weight of which only this part is there; the rest is 0."""
    whole = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    if master is not None:
        whole.view(-1)[start : start + master.numel()] = master
    return tiled(whole, weight.tile)
