"""Frozen weights stored in FP8 or NF4, dequantized per use in forward and backward passes. No dense copy stays.

Every 64 neighbours of a row share a scale in every layout, so a rank's codes and scales equal its part of the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor, nn

from megagrpo.policy.fp8.rounding import E4M3
from megagrpo.policy.layers.megatron_modules import decoder_of, mix_in

STORED_BLOCK = 64
# The 16 values of a 4-bit NormalFloat: quantiles of a normal distribution, 0 among them (QLoRA, arXiv 2305.14314,
# appendix E).
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class StoredWeight(nn.Module):
    """A linear's weight [out, in], stored as `codes` and one float32 scale per 64 elements of a row.

    It reads like the parameter that it replaces: `data` and `detach()` return a new dense tensor in that parameter's
    dtype. `store` takes new dense weights.

    fp8: element / scale as e4m3, where scale is the largest magnitude / 448. nf4: two elements per byte, each the
    nearest of 16 values to element / largest magnitude. Raises ValueError when a row on this rank is not a multiple of
    64 elements.
    """

    codes: Tensor  # fp8: [out, in] e4m3; nf4: [out, in / 2] uint8
    scales: Tensor  # [out, in / 64] float32

    def __init__(self, weight: Any, storage: str):
        super().__init__()
        rows, width = weight.shape
        if width % STORED_BLOCK:
            raise ValueError(
                f"model.base_storage: {storage} needs rows of a multiple of {STORED_BLOCK} elements on each rank, not "
                f"{width}"
            )
        self.shape, self.dtype, self.storage = weight.shape, weight.dtype, storage
        self.tensor_model_parallel, self.partition_dim = weight.tensor_model_parallel, weight.partition_dim
        codes = (
            weight.new_zeros(rows, width, dtype=E4M3)
            if storage == "fp8"
            else weight.new_zeros(rows, width // 2, dtype=torch.uint8)
        )
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer(
            "scales", weight.new_zeros(rows, width // STORED_BLOCK, dtype=torch.float32), persistent=False
        )

    @property
    def data(self) -> Tensor:
        """The dequantized weight [out, in], a new tensor."""
        return self.detach()

    def numel(self) -> int:
        """Return the number of elements of the weight."""
        return self.shape.numel()

    @torch.no_grad()
    def detach(self) -> Tensor:
        """Return the dequantized weight [out, in] in `dtype`, a new tensor."""
        if self.storage == "fp8":
            values = self.codes.float()
        else:
            table = _nf4_table(self.codes.device)
            values = table[torch.stack([self.codes >> 4, self.codes & 15], dim=-1).int().flatten(-2)]
        return (values.unflatten(-1, (-1, STORED_BLOCK)) * self.scales[..., None]).flatten(-2).to(self.dtype)

    @torch.no_grad()
    def store(self, dense: Tensor) -> None:
        """Quantize `dense` [out, in], any float dtype, and replace the weight by it."""
        blocks = dense.float().unflatten(-1, (-1, STORED_BLOCK))
        largest = blocks.abs().amax(-1)
        self.scales.copy_(largest / torch.finfo(E4M3).max if self.storage == "fp8" else largest)
        values = (blocks / self.scales[..., None].clamp(min=torch.finfo(torch.float32).tiny)).flatten(-2)
        if self.storage == "fp8":
            self.codes.copy_(values.clamp(-torch.finfo(E4M3).max, torch.finfo(E4M3).max).to(E4M3))
            return
        table = _nf4_table(dense.device)
        nearest = torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        self.codes.copy_(nearest[..., ::2] << 4 | nearest[..., 1::2])


@functools.lru_cache
def _nf4_table(device: torch.device) -> Tensor:
    """Return `NF4_VALUES` [16] float32 on `device`. Copying to a GPU makes the host wait, so each device has one."""
    return torch.tensor(NF4_VALUES, device=device)


def store_weights(chunks: Sequence[nn.Module], storage: str) -> None:
    """Store all linear weights of the chunks' blocks as `storage` says. Embeddings, LM head and norms are unchanged.

    The stored weights are zeros until they are loaded. Raises ValueError as `StoredWeight` does.
    """
    for chunk in chunks:
        for linear in decoder_of(chunk).modules():
            if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
                linear.stored = StoredWeight(linear.weight, storage)
                linear.weight = nn.Parameter(linear.weight.new_empty(0, 0), requires_grad=False)
                mix_in(linear, Stored)


class Stored:
    """A parallel linear whose weight is in `stored`. Its own `weight` is empty and is left out of checkpoints."""

    def _forward_impl(
        self: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *, sequence_parallel: bool, **options: Any
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=self.tp_group)
        output = _Product.apply(input, self.stored, self.tp_group if options["allreduce_dgrad"] else None)
        return output if bias is None else output + bias

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's sharded state without the empty weight."""
        whole = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]  # the linear's
        del whole[f"{prefix}weight"]
        return whole


class _Product(torch.autograd.Function):
    """x W^T [..., out] of x [..., in] with stored W [out, in]. For the backward pass it saves only W's stored form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: StoredWeight, group: torch.distributed.ProcessGroup | None) -> Tensor:
        ctx.stored, ctx.group = stored, group
        return torch.matmul(x, stored.detach().t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad_x = torch.matmul(grad, ctx.stored.detach())
        if ctx.group is not None:
            torch.distributed.all_reduce(grad_x, group=ctx.group)
        return grad_x, None, None
