"""Weights stored as FP8 numbers and scales between steps (`model.fp8_param`), and functions that read any weight.

An FP8 weight is of Transformer Engine's classes or, without it, an `Fp8Tensor`. A product reads the same numbers as
without `model.fp8_param`, where bf16 weights are rounded per product. Both take the same steps, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import fp8_utils
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megagrpo.policy.fp8.rounding import E4M3, Tile, codes, largest, scale_for, tiled, untiled


class Fp8Tensor(torch.Tensor):
    """A matrix as e4m3 `numbers` [rows, width] uint8: rounded(values * float32 `scales` [tiles down, tiles across]).

    To other code it has dtype `dtype`: operations use `dequantize()`, and `copy_` rounds its argument. In-place
    operations other than `copy_` raise TypeError. Its counterparts are Transformer Engine's Float8Tensor and
    Float8BlockwiseQTensor, which need a GPU.
    """

    numbers: Tensor
    scales: Tensor
    tile: Tile  # type: ignore[assignment]  # hides Tensor.tile
    power_of_two: bool

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, tile: Tile, power_of_two: bool, dtype: torch.dtype) -> Fp8Tensor:
        made: Fp8Tensor = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)
        made.numbers, made.scales, made.tile, made.power_of_two = numbers, scales, tile, power_of_two
        return made

    @classmethod
    def of(cls, dense: Tensor, tile: Tile, power_of_two: bool) -> Fp8Tensor:
        """Round `dense` [rows, width], whose dtype the result reports.

        A tile's largest magnitude maps to the largest e4m3 number; `power_of_two` rounds scales down to a power of two.
        """
        down, across = (-(-size // by) for size, by in zip(dense.shape, tile, strict=True))
        numbers, scales = (
            dense.new_empty(dense.shape, dtype=torch.uint8),
            dense.new_empty(down, across, dtype=torch.float32),
        )
        made = cls(numbers, scales, tile, power_of_two, dense.dtype)
        made.quantize(dense)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors and other attributes, the protocol of torch and Transformer Engine."""
        return ["numbers", "scales"], (self.tile, self.power_of_two, self.dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the numbers."""
        return self.numbers.untyped_storage()

    def values(self) -> Tensor:
        """Return the dequantized matrix [rows, width] in float32."""
        return untiled(tiled(self.numbers, self.tile).view(E4M3).float() / self.scales[:, None, :, None], self.shape)

    def dequantize(self) -> Tensor:
        """Return the dequantized matrix [rows, width] in `dtype`."""
        return self.values().to(self.dtype)

    def quantize(self, dense: Tensor) -> None:
        """Round `dense` [rows, width] into this tensor, with new scales."""
        tiles = tiled(dense, self.tile)
        self.scales.copy_(scale_for(largest(tiles), E4M3, self.power_of_two))
        self.quantize_part(tiles)

    # Without Transformer Engine Megatron calls `dequantize` by this name.
    from_float8 = dequantize

    def quantize_part(self, tiles: Tensor, part: slice = slice(None)) -> None:
        """Round `tiles` of the whole matrix, from `rounding.tiled`, by the current scales; write `part` of the numbers.

        `part` is a slice of the flattened matrix [rows * width].
        """
        numbers = untiled(codes(tiles, E4M3, self.scales[:, None, :, None]).view(torch.uint8), self.shape)
        self.numbers.view(-1)[part].copy_(numbers.reshape(-1)[part])

    @property
    def data(self) -> Tensor:
        """The same numbers [rows, width] and scales, without gradient."""
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        """Share the numbers and scales of another tensor."""
        self.numbers, self.scales = other.numbers, other.scales

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results of operations are plain tensors

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0]
        if operation is torch.ops.aten.detach.default:
            return cls(first.numbers, first.scales, first.tile, first.power_of_two, first.dtype)
        if operation is torch.ops.aten.copy_.default and isinstance(first, cls):
            first.quantize(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            return first
        if operation._schema.is_mutable and isinstance(first, cls):
            raise TypeError(f"{operation} cannot change an FP8 weight in place; use write_dense()")
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return operation(*args, **kwargs)


def is_fp8(weight: Tensor) -> bool:
    """Return whether a weight [...] is stored in FP8, in an `Fp8Tensor` or in Transformer Engine's classes."""
    return fp8_utils.is_float8tensor(weight)


def dense(weight: Tensor) -> Tensor:
    """Return a weight's values [...] in its dtype without gradient: dequantized FP8 or a plain tensor's own memory."""
    return weight.detach().dequantize() if is_fp8(weight) else weight.detach()


def parts(weight: Tensor) -> list[Tensor]:
    """Return the plain tensors that store a weight [...]: the weight itself if it is plain, else numbers and scales."""
    return [getattr(weight, name) for name in _inner_names(weight)] if is_fp8(weight) else [weight]


def _inner_names(weight: Any) -> list[str]:
    return weight.__tensor_flatten__()[0]


def copied(weight: Tensor) -> Tensor:
    """Return a copy of a weight [...] without gradient and with its own storage. clone() of Transformer Engine's
    tensors would share the scale."""
    if not is_fp8(weight):
        return weight.detach().clone()
    made = weight.detach()
    for name in _inner_names(made):
        setattr(made, name, getattr(made, name).clone())
    return made


def store_in_fp8(linear: Any, tile: Tile, power_of_two: bool) -> None:
    """Replace the weight [out, in] of a linear by an `Fp8Tensor` with one scale per `tile`."""
    rounded = nn.Parameter(Fp8Tensor.of(linear.weight.detach(), tile, power_of_two))
    rounded.__dict__.update(linear.weight.__dict__)  # attributes that Megatron sets
    linear.weight = rounded
