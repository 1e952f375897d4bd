"""Matrix products of 16-bit numbers for CPUs without instructions for them: multiplied in float32, rounded once.

oneDNN emulates such products there at a quarter of the speed of float32 ones. The product of two 16-bit numbers is
exact in float32. Both ways sum in float32 and round once: only the order of the sum differs.
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
_dtypes: set[torch.dtype] = set()


def install(dtype: torch.dtype) -> None:
    """Replace aten's CPU kernels for matrix products of the 16-bit `dtype` in this process and its forks, not for other
    dtypes.

    Idempotent. Can go when oneDNN widens these numbers itself where the CPU cannot multiply them.
    """
    global _library
    _dtypes.add(dtype)
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    for name in PRODUCTS:
        stock = torch.library.get_kernel(f"aten::{name}", "CPU")
        _library.impl(name, functools.partial(_wide, stock), "CPU", with_keyset=True, allow_override=True)
    stock_out = torch.library.get_kernel("aten::mm.out", "CPU")
    _library.impl("mm.out", functools.partial(_wide_mm_out, stock_out), "CPU", with_keyset=True, allow_override=True)


def _wide(stock: Kernel, keys: torch._C.DispatchKeySet, *tensors: Tensor, **scalars: float) -> Tensor:
    dtype = tensors[0].dtype
    if dtype not in _dtypes:
        return stock.call_boxed(keys, *tensors, **scalars)
    return stock.call_boxed(keys, *(t.float() for t in tensors), **scalars).to(dtype)


def _wide_mm_out(stock: Kernel, keys: torch._C.DispatchKeySet, one: Tensor, other: Tensor, *, out: Tensor) -> Tensor:
    if out.dtype not in _dtypes:
        return stock.call_boxed(keys, one, other, out=out)
    wide = torch.empty(out.shape, dtype=torch.float32)
    return out.copy_(stock.call_boxed(keys, one.float(), other.float(), out=wide))
