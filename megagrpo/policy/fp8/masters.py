"""FP8 weights and their float32 masters: masters start from unrounded values, and each step rounds them to FP8 again.

Megatron's sharded optimizer updates each rank's part of the masters, rounds it to FP8 numbers, and all-gathers their
bytes. A scale follows from the whole weight, so the ranks agree on it by a max-reduction first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from torch import Tensor, nn

from megagrpo.policy.fp8.rounding import E4M3, largest, scale_for, tiled
from megagrpo.policy.fp8.tensor import Fp8Tensor


def store_unrounded(weight: Tensor, values: Tensor) -> None:
    """Keep `values` [out, in], an FP8 weight's values before rounding, on the host in the weight's dtype.

    The weight's float32 master is then initialized from them, without the rounding error of FP8.
    """
    weight.__dict__["unrounded"] = values.detach().to(weight.dtype).cpu()


def unrounded_values(weight: Tensor) -> Tensor | None:
    """Return the values [out, in] of `store_unrounded`, on the host; None before it and after `drop_unrounded`."""
    return weight.__dict__.get("unrounded")


def drop_unrounded(chunks: Sequence[nn.Module]) -> None:
    """Drop the unrounded values of the chunks' weights, once the masters are copied from them."""
    for weight in (weight for chunk in chunks for weight in chunk.parameters()):
        weight.__dict__.pop("unrounded", None)


def patch_optimizer() -> None:
    """Patch megatron.core.fp8_utils to accept `Fp8Tensor` as Transformer Engine's FP8 class."""
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS, fp8_utils.FP8_TENSOR_CLASS = True, Fp8Tensor
    fp8_utils._modify_underlying_storage_impl = _move_numbers
    fp8_utils._quantize_param_shard_impl = _round_masters


def _move_numbers(weight: Fp8Tensor, buffer: Tensor) -> None:
    """Move the FP8 numbers into `buffer` [rows, width] uint8, a part of the optimizer's all-gather buffer."""
    buffer.copy_(weight.numbers)
    weight.numbers = buffer


def _round_masters(
    weights: Sequence[Fp8Tensor],
    masters: Sequence[Tensor | None],
    starts: Sequence[int | None],
    group: dist.ProcessGroup,
    *others: None,
) -> None:
    """Round this rank's part of each float32 master, from element `start`, into FP8 numbers; None if it has no part.

    Collective over `group`, whose ranks together hold all parts. As in Transformer Engine 2.20
    (`quantize_master_weights`), scales are computed over whole weights, from masters cast to the weights' dtype.
    """
    if not weights:
        return
    parts = list(zip(weights, masters, starts, strict=True))
    # A max-reduction over ranks may lose NaN. Infinity has the same effect on the scale as NaN.
    amaxes = [largest(_tiles_of_part(*part)).nan_to_num(nan=torch.inf) for part in parts]
    joined = torch.cat([amax.flatten() for amax in amaxes])
    dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
    for (weight, master, start), amax in zip(parts, joined.split([a.numel() for a in amaxes]), strict=True):
        weight.scales.copy_(scale_for(amax.view(weight.scales.shape), E4M3, weight.power_of_two))
        if master is not None and start is not None:
            weight.quantize_part(_tiles_of_part(weight, master, start), slice(start, start + master.numel()))


def _tiles_of_part(weight: Fp8Tensor, master: Tensor | None, start: int | None) -> Tensor:
    """Return the tiles of a weight that has only this part of the master, from flat element `start`; the rest is 0."""
    whole = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    if master is not None and start is not None:
        whole.view(-1)[start : start + master.numel()] = master
    return tiled(whole, weight.tile)
