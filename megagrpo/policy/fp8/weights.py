"""Weights stored as FP8 numbers and scales between steps (`model.fp8_param`), and their reads and writes by the rest of the package. The
tensors are Transformer Engine's or, without it, `Fp8Tensor`s.

Megatron's sharded optimizer rounds float32 masters to FP8 in each step, and its ranks all-gather bytes. A product reads the same numbers
as without `model.fp8_param`, where bf16 weights are rounded for each product. Both therefore take the same steps, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megagrpo.policy.fp8.rounding import E4M3, Tile, codes, largest, scale_for, tiled, untiled


class Fp8Tensor(torch.Tensor):
    """A matrix stored as e4m3 `numbers` [rows, width] uint8 and float32 `scales` [tiles down, tiles across]; numbers = rounded(value *
    scale).

    To other code it has dtype `dtype`: operations use `dequantize()`, and `copy_` rounds its argument. In-place operations other than
    `copy_` raise TypeError. Its counterparts are Transformer Engine's Float8Tensor and Float8BlockwiseQTensor, which need a GPU.
    """

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, tile: Tile, power_of_two: bool, dtype: torch.dtype) -> Fp8Tensor:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)
        made.numbers, made.scales, made.tile, made.power_of_two = numbers, scales, tile, power_of_two
        return made

    @classmethod
    def of(cls, dense: Tensor, tile: Tile, power_of_two: bool) -> Fp8Tensor:
        """Round `dense` [rows, width], whose dtype the result reports.

        Each tile's largest magnitude maps to the largest e4m3 number; with `power_of_two` the scale is rounded down to a power of two.
        """
        down, across = (-(-size // by) for size, by in zip(dense.shape, tile, strict=True))
        numbers, scales = dense.new_empty(dense.shape, dtype=torch.uint8), dense.new_empty(down, across, dtype=torch.float32)
        made = cls(numbers, scales, tile, power_of_two, dense.dtype)
        made.round(dense)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the tensors inside and the other attributes, the protocol of torch and Transformer Engine."""
        return ["numbers", "scales"], (self.tile, self.power_of_two, self.dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def values(self) -> Tensor:
        """Return the dequantized matrix [rows, width] in float32."""
        return untiled(tiled(self.numbers, self.tile).view(E4M3).float() / self.scales[:, None, :, None], self.shape)

    def dequantize(self) -> Tensor:
        """Return the dequantized matrix [rows, width] in `dtype`."""
        return self.values().to(self.dtype)

    def round(self, dense: Tensor) -> None:
        """Round `dense` [rows, width] into this tensor, with new scales."""
        tiles = tiled(dense, self.tile)
        self.scales.copy_(scale_for(largest(tiles), E4M3, self.power_of_two))
        self.put(tiles)

    # Without Transformer Engine Megatron calls `dequantize` by this name.
    from_float8 = dequantize

    def put(self, tiles: Tensor, part: slice = slice(None)) -> None:
        """Write `part` (a slice of the flattened matrix) of the numbers, rounded from `tiles` of the whole matrix by the current scales."""
        found = untiled(codes(tiles, E4M3, self.scales[:, None, :, None]).view(torch.uint8), self.shape)
        self.numbers.view(-1)[part].copy_(found.reshape(-1)[part])

    @property
    def data(self) -> Fp8Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Fp8Tensor) -> None:
        """Share the numbers and scales of another tensor."""
        self.numbers, self.scales = other.numbers, other.scales

    __torch_function__ = torch._C._disabled_torch_function_impl  # results of operations are plain tensors

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        of = args[0]
        if operation is torch.ops.aten.detach.default:
            return cls(of.numbers, of.scales, of.tile, of.power_of_two, of.dtype)
        if operation is torch.ops.aten.copy_.default and isinstance(of, cls):
            of.round(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            return of
        if operation._schema.is_mutable and isinstance(of, cls):
            raise TypeError(f"{operation} cannot change an FP8 weight in place; use write()")
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return operation(*args, **kwargs)


class DenseWeight:
    """View of an FP8 parameter for code that slices tensors: the parameter's attributes, but `data` and `detach()` return a new dense
    copy in its dtype, and `store` writes dense values back."""

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
        """Write dense `values`, in the weight's shape, into the parameter."""
        write(self.weight, values)


def is_fp8(weight: Tensor) -> bool:
    """Whether a weight is stored as FP8 numbers and scales, in an `Fp8Tensor` or in Transformer Engine's classes."""
    return fp8_utils.is_float8tensor(weight)


def dense(weight: Tensor) -> Tensor:
    """Return a weight's values in its dtype, without gradient: dequantized from FP8, or a plain tensor's own memory."""
    return weight.detach().dequantize() if is_fp8(weight) else weight.detach()


def parts(weight: Tensor) -> list[Tensor]:
    """Return the plain tensors that store a weight: the weight itself if it is plain."""
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]] if is_fp8(weight) else [weight]


def copied(weight: Tensor) -> Tensor:
    """Return a copy of a weight without gradient and with its own storage. clone() of Transformer Engine's tensors would share the
    scale."""
    if not is_fp8(weight):
        return weight.detach().clone()
    made = weight.detach()
    for name in made.__tensor_flatten__()[0]:
        setattr(made, name, getattr(made, name).clone())
    return made


@torch.no_grad()
def write(weight: Tensor, values: Tensor) -> None:
    """Replace a weight's values. An FP8 weight rounds them and also remembers `values` (see `remember`)."""
    weight.copy_(values)
    if is_fp8(weight):
        remember(weight, values)


def remember(weight: Tensor, values: Tensor) -> None:
    """Keep an FP8 weight's values before FP8 rounding in host memory, in the weight's dtype, so that its master starts without that
    rounding."""
    weight.unrounded = values.detach().to(weight.dtype).cpu()


def unrounded(weight: Tensor) -> Tensor | None:
    """Return the values last written to an FP8 weight before rounding, in host memory; None after `forget_unrounded`."""
    return weight.__dict__.get("unrounded")


def forget_unrounded(chunks: Sequence[nn.Module]) -> None:
    """Drop the unrounded values of the chunks' weights, once the masters are copied from them."""
    for weight in (weight for chunk in chunks for weight in chunk.parameters()):
        weight.__dict__.pop("unrounded", None)


def hold_in_fp8(linear: nn.Module, tile: Tile, power_of_two: bool) -> None:
    """Replace the weight of a linear by an `Fp8Tensor`."""
    _show_megatron()
    rounded = nn.Parameter(Fp8Tensor.of(linear.weight.detach(), tile, power_of_two))
    rounded.__dict__.update(linear.weight.__dict__)  # attributes that Megatron sets
    linear.weight = rounded


def _show_megatron() -> None:
    """Patch Megatron to accept `Fp8Tensor` as Transformer Engine's FP8 class. All names that it needs are in one module, fp8_utils."""
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS, fp8_utils.FP8_TENSOR_CLASS = True, Fp8Tensor
    fp8_utils._modify_underlying_storage_impl = _move_numbers
    fp8_utils._quantize_param_shard_impl = _round_masters


def _move_numbers(weight: Fp8Tensor, place: Tensor) -> None:
    place.copy_(weight.numbers)
    weight.numbers = place


def _round_masters(
    weights: Sequence[Fp8Tensor], masters: Sequence[Tensor | None], starts: Sequence[int | None], group: dist.ProcessGroup, *others: None
) -> None:
    """Round this rank's part of each weight's float32 master, from element `start`, into the FP8 numbers; None where it has no part.

    Collective over `group`, whose ranks together hold all parts. As in Transformer Engine 2.20 (`quantize_master_weights`), scales are
    computed over whole weights, from masters cast to the weights' dtype.
    """
    if not weights:
        return
    own = list(zip(weights, masters, starts, strict=True))
    # A max-reduction over ranks may lose NaN. Infinity has the same effect on the scale as NaN.
    magnitudes = [largest(_in_place(*each)).nan_to_num(nan=torch.inf) for each in own]
    joined = torch.cat([each.flatten() for each in magnitudes])
    dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
    for (weight, master, start), most in zip(own, joined.split([each.numel() for each in magnitudes]), strict=True):
        weight.scales.copy_(scale_for(most.view(weight.scales.shape), E4M3, weight.power_of_two))
        if master is not None:
            weight.put(_in_place(weight, master, start), slice(start, start + master.numel()))


def _in_place(weight: Fp8Tensor, master: Tensor | None, start: int | None) -> Tensor:
    """Return the tiles of a weight that holds only this part of the master; the rest is 0."""
    whole = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    if master is not None:
        whole.view(-1)[start : start + master.numel()] = master
    return tiled(whole, weight.tile)
