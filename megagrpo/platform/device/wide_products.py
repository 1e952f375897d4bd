"""bfloat16 matrix products for CPUs without bfloat16 instructions: multiplied in float32 and rounded once.

oneDNN emulates such products there at a quarter of the speed of float32 ones. The product of two bfloat16 numbers is
exact in float32. Both ways sum in float32 and round once to bfloat16: only the order of the sum differs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._C import _SafeKernelFunction as Kernel

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")

_library: torch.library.Library | None = None


def install() -> None:
    """Replace aten's CPU kernels for bfloat16 matrix products in this process and its forks, not for other dtypes.

    Idempotent. Can go when oneDNN widens bfloat16 itself where the CPU cannot multiply it.
    """
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    for name in PRODUCTS:
        stock = torch.library.get_kernel(f"aten::{name}", "CPU")
        _library.impl(name, functools.partial(_wide, stock), "CPU", with_keyset=True, allow_override=True)
    stock_out = torch.library.get_kernel("aten::mm.out", "CPU")
    _library.impl("mm.out", functools.partial(_wide_mm_out, stock_out), "CPU", with_keyset=True, allow_override=True)


def _wide(stock: Kernel, keys: torch._C.DispatchKeySet, *tensors: Tensor, **scalars: float) -> Tensor:
    if tensors[0].dtype is not torch.bfloat16:
        return stock.call_boxed(keys, *tensors, **scalars)
    return stock.call_boxed(keys, *(t.float() for t in tensors), **scalars).bfloat16()


def _wide_mm_out(stock: Kernel, keys: torch._C.DispatchKeySet, one: Tensor, other: Tensor, *, out: Tensor) -> Tensor:
    if out.dtype is not torch.bfloat16:
        return stock.call_boxed(keys, one, other, out=out)
    wide = torch.empty(out.shape, dtype=torch.float32)
    return out.copy_(stock.call_boxed(keys, one.float(), other.float(), out=wide))
